"""What a server in front of strangers must withstand: keys, sizes, slow clients, odd requests."""

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from nanovllm import AsyncLLM
from nanovllm.apps.server.server_options import ServerOptions
from nanovllm.errors import ConfigError
from tests.server.conftest import Reply, Running, running

KEYS = ("first-key", "second-key")


@pytest.fixture(scope="module")
def guarded(front: str, async_llm: AsyncLLM) -> Iterator[Running]:
    """A server with API keys, small limits and short deadlines."""
    limits = {"max_body_bytes": 20000, "read_timeout": 0.5, "min_priority": -5}
    with running(async_llm, api_keys=KEYS, **limits) as found:
        yield found


def raw(server: Running, *pieces: bytes, pause: float = 0.0) -> bytes:
    """Send pieces of bytes, and return all that comes until the server closes the connection."""
    with socket.create_connection((server.host, server.port), timeout=20) as connection:
        for piece in pieces:
            try:
                connection.sendall(piece)
            except OSError:
                break
            time.sleep(pause)
        found = b""
        try:
            while piece := connection.recv(65536):
                found += piece
        except ConnectionResetError:
            pass
        return found


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/openapi.json", "/v1/nothing"])
def test_everything_needs_a_key(guarded: Running, path: str) -> None:
    reply = guarded.send(path)
    assert reply.status == 401
    assert reply.error["code"] == "invalid_api_key"
    assert reply.headers["WWW-Authenticate"] == "Bearer"
    for key in KEYS:
        assert guarded.send(path, Authorization=f"Bearer {key}").status in (200, 404)
        assert guarded.send(path, X_API_Key=key).status in (200, 404)


@pytest.mark.parametrize("path", ["/health", "/ready", "/"])
def test_probes_need_no_key(guarded: Running, path: str) -> None:
    assert guarded.send(path).status == 200


@pytest.mark.parametrize(
    "header",
    [
        "Authorization: Bearer",
        "Authorization: first-key",
        "Authorization: Basic first-key",
        "Authorization: Bearer first-keyx",
        "Authorization: Bearer first-key, Bearer wrong",
        "Authorization: Bearer wrong\r\nAuthorization: Bearer first-key",
        "Authorization: Bearer wrong\r\nX-API-Key: first-key",
        "X-API-Key: FIRST-KEY",
        "X_API_KEY: first-key",
        "Authorization: Bearer \xff\xfe",
        "X-Original-URL: /health",
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "//health", "/health/../v1/models"])
def test_no_header_and_no_path_gets_past_the_keys(guarded: Running, header: str, path: str) -> None:
    request = f"GET {path} HTTP/1.1\r\nHost: a\r\n{header}\r\nConnection: close\r\n\r\n"
    assert raw(guarded, request.encode("latin-1")).split(b" ")[1] in (b"401", b"400")


def head(*headers: str) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "Host: a", "Content-Type: application/json"]
    return "\r\n".join([*lines, "X-API-Key: first-key", *headers, "", ""]).encode()


BODY = b'{"prompt": "What is", "max_tokens": 1}'
CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ([f"Content-Length: {len(BODY)}", "Content-Length: 5"], BODY),
        ([f"Content-Length: {len(BODY)}, 5"], BODY),
        ([f"Content-Length: {len(BODY)}", "Transfer-Encoding: chunked"], CHUNKED),
        (["Transfer-Encoding: chunked", "Transfer-Encoding: identity"], CHUNKED),
        (["Transfer-Encoding: xchunked"], CHUNKED),
        (["Transfer-Encoding : chunked"], CHUNKED),
        (["Content-Length: -1"], BODY),
        ([f"Content-Length: +{len(BODY)}"], BODY),
    ],
)
def test_a_length_that_two_servers_could_read_differently_is_refused(
    guarded: Running, headers: list[str], body: bytes
) -> None:
    """A second request hidden behind the first must not be answered."""
    hidden = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
    found = raw(guarded, head(*headers) + body + hidden)
    assert found.split(b" ")[1] in (b"400", b"501")
    assert found.count(b"HTTP/1.1 ") == 1
    assert b'"error"' in found


def test_a_chunked_body_is_read(guarded: Running) -> None:
    found = raw(guarded, head("Transfer-Encoding: chunked", "Connection: close") + CHUNKED)
    assert found.startswith(b"HTTP/1.1 200")


def test_bodies_are_limited(guarded: Running) -> None:
    reply = guarded.send("/v1/completions", {"prompt": "a" * 20000}, X_API_Key="first-key")
    assert reply.status == 413
    assert "max_body_bytes" in reply.error["message"]
    piece = b"4000\r\n" + b" " * 0x4000 + b"\r\n"
    found = raw(guarded, head("Transfer-Encoding: chunked") + piece * 3)
    assert found.startswith(b"HTTP/1.1 413")
    found = raw(guarded, head("Content-Length: 999999999999", "Expect: 100-continue"))
    assert found.startswith(b"HTTP/1.1 413")
    assert b"100 Continue" not in found


@pytest.mark.parametrize(
    "headers",
    [[f"X-{index}: a" for index in range(101)], ["X-Long: " + "a" * 40000]],
    ids=["many", "long"],
)
def test_headers_are_limited(guarded: Running, headers: list[str]) -> None:
    found = raw(guarded, head("Content-Length: 0", *headers))
    assert found.split(b" ")[1] in (b"400", b"431")
    assert b'"error"' in found


@pytest.mark.parametrize(
    "start",
    [b"POST /v1/comple", head("Transfer-Encoding: chunked")],
    ids=["line", "chunks"],
)
def test_a_client_that_sends_a_byte_now_and_then_is_cut_off(guarded: Running, start: bytes) -> None:
    """The limit is 0.5 s for the whole request."""
    begin = time.monotonic()
    found = raw(guarded, start, *[b"a"] * 15, pause=0.1)
    assert time.monotonic() - begin < 8
    assert found == b"" or found.split(b" ")[1] in (b"408", b"400")
    assert guarded.send("/health").status == 200


def test_a_client_that_reads_nothing_is_cut_off(
    guarded: Running, async_llm: AsyncLLM, idle_afterwards: None
) -> None:
    body = b'{"prompt": [1], "max_tokens": 1000, "n": 64, "stream": true, "ignore_eos": true}'
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((guarded.host, guarded.port))
        connection.sendall(head(f"Content-Length: {len(body)}") + body)
        deadline = time.monotonic() + 30
        while guarded.state.admission.num_active == 0:
            assert time.monotonic() < deadline
        while guarded.state.admission.num_active:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.parametrize(("words", "status"), [(4 * 10**6, 413), (7 * 10**5, 400)])
def test_health_answers_while_a_large_prompt_is_refused(
    server: Running, words: int, status: int
) -> None:
    """10 MB are more than a body may have. 4 MB of text take seconds to tokenize; they are refused
    before, and nobody waits for them.
    """
    large: list[Reply] = []

    def send(body: Any, path: str) -> None:
        large.append(server.send(path, body))

    text = "word " * words
    bodies: list[tuple[Any, str]] = [
        ({"prompt": text}, "/v1/completions"),
        ({"messages": [{"role": "user", "content": text}]}, "/v1/chat/completions"),
    ]
    for body in bodies:
        thread = threading.Thread(target=send, args=body)
        thread.start()
        slowest = 0.0
        while thread.is_alive():
            begin = time.monotonic()
            assert server.send("/health").status == 200
            slowest = max(slowest, time.monotonic() - begin)
        assert large[-1].status == status
        assert status == 413 or large[-1].error["param"] in ("prompt", "messages")
        assert slowest < 0.5  # of which most is this process's own work


def test_a_priority_below_the_lowest_is_refused(guarded: Running) -> None:
    for priority, status in ((-6, 400), (-5, 200), (2**31, 200)):
        body = {"prompt": "a", "max_tokens": 1, "priority": priority}
        reply = guarded.send("/v1/completions", body, X_API_Key=KEYS[0])
        assert reply.status == status
        assert status == 200 or "min_priority" in reply.error["message"]


def test_template_code_in_a_message_is_not_run(server: Running) -> None:
    text = "{{ ''.__class__.__mro__[1].__subclasses__() }}{% for i in range(9) %}x{% endfor %}"
    tokens = server.send("/tokenize", {"messages": [{"role": "user", "content": text}]})
    rendered = server.send("/detokenize", {"tokens": tokens.body["tokens"]})
    assert text in rendered.body["prompt"]


@pytest.mark.parametrize(
    ("path", "field"),
    [("/tokenize", "messages"), ("/v1/chat/completions", "messages"), ("/v1/responses", "input")],
)
def test_no_route_takes_a_template(server: Running, path: str, field: str) -> None:
    body = {field: [{"role": "user", "content": "Hi"}]}
    kwargs = {"chat_template": "{% for i in range(10**9) %}{% endfor %}"}
    reply = server.send(path, {**body, "chat_template_kwargs": kwargs})
    assert (reply.status, reply.error["param"]) == (400, "chat_template_kwargs")
    assert server.send(path, {**body, "chat_template_kwargs": {"other": 1}}).status == 200


@pytest.mark.parametrize("host", ["evil.example:8000", "localhost.evil.example"])
def test_a_page_whose_name_was_led_here_gets_nothing(server: Running, host: str) -> None:
    """Its browser takes this server for the page's own, so CORS does not count."""
    for path in ("/", "/health", "/v1/models"):
        reply = server.send(path, Host=host)
        assert reply.status == 421
        assert reply.error["code"] == "wrong_host"


def test_names_of_this_machine_are_let_in(server: Running, guarded: Running) -> None:
    """Clients of vLLM call 0.0.0.0, which no name of a page is."""
    for host in ("localhost", "LOCALHOST:80", "127.0.0.1:1", "[::1]:8000", "[::1]", "0.0.0.0:8000"):
        assert server.send("/health", Host=host).status == 200
    assert guarded.send("/health", Host="with-a-key.example").status == 200
    assert "127.0.0.7" in (ServerOptions(host="127.0.0.7").allowed_hosts or ())
    for options in (
        ServerOptions(host="0.0.0.0"),
        ServerOptions(uds="a.sock"),
        ServerOptions(api_keys=("a",)),
    ):
        assert options.allowed_hosts is None


def test_cors_is_off_unless_asked_for(server: Running, async_llm: AsyncLLM) -> None:
    reply = server.send("/health", Origin="https://a.example")
    assert "access-control-allow-origin" not in reply.headers
    with running(async_llm, cors_origins=("https://a.example",)) as other:
        reply = other.send("/health", Origin="https://a.example")
        assert reply.headers["access-control-allow-origin"] == "https://a.example"


@pytest.mark.parametrize("origin", ["localhost", "https://a.example/", "https://A"])
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match=f"cors_origins must be .*, got {origin!r}"):
        ServerOptions(cors_origins=("*", "http://[::1]:3000", origin))
