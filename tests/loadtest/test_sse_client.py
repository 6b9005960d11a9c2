"""The HTTP client: any cut of the bytes gives the same events; what a server may do wrong."""

import asyncio
import itertools
import json
import re
import socket
from typing import Any

import pytest
from hypothesis import given, strategies as st

from nanovllm.errors import ConfigError, InvalidRequestError, ServerError
from nanovllm.loadtest import sse_client
from nanovllm.loadtest.sse_client import Connections, choices_of, find_server
from nanovllm.loadtest.sse_response import MAX_HEAD_BYTES, Response
from tests.wire_server import (
    HEAD,
    LAST_CHUNK,
    Asked,
    Script,
    Step,
    WireServer,
    chunk,
    event,
    streamed,
    text_event,
    usage_event,
    whole,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n"))
PLAIN_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type:text/event-stream\r\n"


def events_of(data: bytes, cuts: list[int]) -> tuple[list[str], Response]:
    """Feed an answer in pieces, then end the connection."""
    response, found = Response(), []
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for start, stop in itertools.pairwise(places):
        found += response.feed(data[start:stop])
    response.end()
    return found, response


@given(
    texts=st.lists(st.lists(TEXT, min_size=1, max_size=3), max_size=5),
    sizes=st.lists(st.integers(1, 40), min_size=1),
    cuts=st.lists(st.integers(0, 10_000), max_size=40),
    newline=st.sampled_from([b"\n", b"\r\n"]),
    framing=st.sampled_from(["chunks", "length", "until the end"]),
    noise=st.booleans(),
)
def test_any_cut_gives_the_same_events(
    texts: list[list[str]],
    sizes: list[int],
    cuts: list[int],
    newline: bytes,
    framing: str,
    noise: bool,
) -> None:
    body = b""
    for lines in texts:
        body += (b": ping" + newline + newline + b"event: delta" + newline) * noise
        body += b"".join(b"data: " + line.encode() + newline for line in lines) + newline
    if framing == "chunks":
        data, rest = HEAD, body
        for size in sizes * len(body):
            data += chunk(rest[:size]) if rest else b""
            rest = rest[size:]
        data += b"0;last\r\nTrailer: x\r\n\r\n" if noise else LAST_CHUNK
    elif framing == "length":
        data = PLAIN_HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    else:
        data = PLAIN_HEAD + b"\r\n" + body
    if noise:
        data = b"HTTP/1.1 100 Continue\r\n\r\n" + data
    found, response = events_of(data, cuts)
    assert found == ["\n".join(lines) for lines in texts]
    assert response.is_complete
    assert response.keeps_alive == (framing != "until the end")


@given(data=st.binary(), cuts=st.lists(st.integers(0, 200)))
def test_any_bytes_are_read_or_refused(data: bytes, cuts: list[int]) -> None:
    for start in (b"", b"HTTP/1.1 200 OK\r\n", HEAD, HEAD + b"5\r\n"):
        try:
            _, response = events_of(start + data, cuts)
        except ServerError:
            continue
        assert response.is_complete


@given(stop=st.integers(0, 400))
def test_an_answer_cut_short_is_an_error(stop: int) -> None:
    data = b"".join(piece for _, piece in streamed((0, text_event("a")), (0, text_event("b"))))
    response = Response()
    response.feed(data[:stop])
    if stop >= len(data):
        response.end()
    else:
        with pytest.raises(ServerError, match="closed the connection before its answer ended"):
            response.end()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "no HTTP server: its answer begins with 'SSH-2.0"),
        (b"x" * (MAX_HEAD_BYTES + 1), "a head of more than 65536 bytes"),
        (HEAD + b"zz\r\n", "a chunk of size b'zz'"),
        (HEAD + b"-5\r\n", "a chunk of size b'-5'"),
    ],
)
def test_what_is_no_answer_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ServerError, match=message):
        Response().feed(data)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", ("127.0.0.1", 8000, "", False)),
        ("http://localhost:8000/v1/", ("localhost", 8000, "", False)),
        ("https://example.com/llm/v1", ("example.com", 443, "/llm", True)),
        ("http://[::1]:9", ("::1", 9, "", False)),
    ],
)
def test_urls(url: str, expected: tuple[Any, ...]) -> None:
    server = find_server(url, "a-key")
    assert (server.host, server.port, server.path, server.tls is not None) == expected
    assert "a-key" not in repr(server)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:8000",
        "ftp://a",
        "http://",
        "http://a b",
        "http://a:x",
        "http://a:99999",
        "http://user:secret@a",
        "http://a\r\nX: y",
        "http://[::1",
        "http://a/?b=c",
    ],
)
def test_bad_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="the server's URL must be like"):
        find_server(url)


def test_keys_come_from_the_argument_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-the-environment")
    for given_key, sent in ((None, "from-the-environment"), ("own", "own")):
        request = find_server("http://a:1", given_key).request("GET", "/x")
        assert f"Authorization: Bearer {sent}\r\n".encode() in request
    monkeypatch.delenv("OPENAI_API_KEY")
    assert b"Authorization" not in find_server("http://a:1").request("GET", "/x")
    with pytest.raises(ConfigError, match="printable ASCII"):
        find_server("http://a:1", "two\r\nX-Lines: 1")


def ask(script: Script, api: str = "both") -> list[list[str | None]]:
    """Post a request in both ways, and return the events that each got."""
    with WireServer(script) as wire:
        server = find_server(wire.url)
        blocking = list(sse_client.stream(server, "/v1/completions", {"n": 1}))
        got: list[str | None] = []

        async def post() -> None:
            connections = Connections(server)
            try:
                await connections.post(server.request("POST", "/v1/completions", {}), got.append)
            finally:
                connections.close()

        asyncio.run(post())
    return [blocking, got]


def test_both_ways_give_the_events() -> None:
    values = [text_event("Hé"), text_event("llo 👋", "stop"), usage_event(3, 2)]
    for cut in (0, 1):
        for got in ask(lambda _, cut=cut: streamed(*((0, v) for v in values), cut=cut)):  # type: ignore[misc]
            *events, done = [data for data in got if data is not None]  # None: a part of an event
            assert done == "[DONE]"
            assert [json.loads(data) for data in events] == values


def test_a_slow_server_gives_none_meanwhile() -> None:
    blocking, _ = ask(lambda _: streamed((0.35, text_event("a", "stop"))))
    assert blocking.count(None) >= 2
    assert blocking[-1] == "[DONE]"


@pytest.mark.parametrize(
    ("steps", "error", "message"),
    [
        ([(0.0, whole(400, {"error": {"message": "n is bad"}}))], InvalidRequestError, "n is bad"),
        ([(0.0, whole(503, {"error": {"message": "full"}}))], ServerError, "answers 503: full"),
        ([(0.0, whole(404, {"detail": "Not Found"}))], ServerError, "answers 404: Not Found"),
        ([(0.0, whole(200, {"choices": []}))], ServerError, "does not stream"),
        ([], ServerError, "closed the connection before"),
        ([(0.0, HEAD + chunk(event("a"))), (0.0, b"zz\r\n")], ServerError, "a chunk of size"),
    ],
)
def test_errors_of_a_server(steps: list[Step], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ask(lambda _: steps)
    with WireServer(lambda _: steps) as wire:
        server = find_server(wire.url)
        request = server.request("POST", "/v1/completions", {})
        with pytest.raises(error, match=message):
            asyncio.run(Connections(server).post(request, lambda _: None))


@pytest.mark.parametrize(
    "choices",
    [
        {"a": 1},
        "x",
        1,
        ["x"],
        [None],
        [{"delta": "x"}],
        [{"delta": ["x"]}],
        [{"delta": {"content": 5}}],
        [{"delta": {"content": ["a"]}}],
        [{"delta": {"reasoning": {"a": 1}}}],
        [{"text": 5}],
        [{"text": "a"}, {"text": "b", "finish_reason": 1}],
    ],
)
def test_events_of_an_odd_form_are_refused(choices: Any) -> None:
    with pytest.raises(ServerError, match='an event of an unknown form: {"choices": '):
        choices_of({"choices": choices})


def test_choices_of_events() -> None:
    assert choices_of({}) == choices_of({"choices": None}) == choices_of({"choices": []}) == []
    assert choices_of({"choices": [{"text": "a", "finish_reason": "stop"}, {"delta": None}]}) == [
        ("a", "", "stop", {}),
        ("", "", None, {}),
    ]
    delta = {"content": None, "reasoning": "b", "role": "assistant"}
    assert choices_of({"choices": [{"delta": delta}]}) == [("", "b", None, delta)]


def unused_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def test_a_server_that_is_not_there() -> None:
    server = find_server(f"http://127.0.0.1:{unused_port()}")
    with pytest.raises(ServerError, match="cannot reach 127.0.0.1:.*refused"):
        sse_client.fetch(server, "/v1/models")
    with pytest.raises(ServerError, match="cannot reach 127.0.0.1"):
        asyncio.run(Connections(server).post(b"", lambda _: None))


def test_first_model() -> None:
    with WireServer(lambda _: []) as wire:
        assert sse_client.first_model(find_server(wire.url + "/v1")) == "wire-model"
    with (
        WireServer(lambda _: [(0.0, whole(200, {}))]) as wire,
        pytest.raises(ServerError, match="lists no model at /v1/models"),
    ):
        sse_client.first_model(find_server(wire.url + "/other"))


def test_connections_are_kept_and_made_again() -> None:
    """The second answer announces that its connection ends; the fourth finds its one ended."""
    closing = HEAD.replace(b"Transfer", b"Connection: close\r\nTransfer")
    answers = iter(
        [
            streamed((0, text_event("a"))),
            [(0.0, closing + LAST_CHUNK)],
            streamed((0, text_event("b"))),
            [],
            streamed((0, text_event("c"))),
        ]
    )

    def script(_: Asked) -> list[Step]:
        return next(answers)

    with WireServer(script) as wire:
        server = find_server(wire.url)
        got: list[str] = []

        async def post() -> None:
            connections = Connections(server)
            for _ in range(4):
                await connections.post(server.request("POST", "/x", {}), got.append)
            connections.close()

        asyncio.run(post())
        assert wire.num_connections == 3
    assert re.findall(r'"text": "(.)"', " ".join(got)) == ["a", "b", "c"]
