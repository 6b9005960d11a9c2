"""The HTTP client: any cut of the bytes gives the same events; what a server may do wrong."""

import itertools
import json
import socket
from typing import Any

import pytest
from hypothesis import given, strategies as st

from nanovllm.apps.cli import server_client
from nanovllm.apps.cli.server_client import choice_of, events, find_server
from nanovllm.errors import ConfigError, InvalidRequestError, ServerError
from tests.wire_server import (
    CLOSE,
    HEAD,
    MODELS,
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

HEAD_OF_9 = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"
REDIRECT = b"HTTP/1.1 302 Found\r\nLocation: http://a/\r\nContent-Length: 0\r\n\r\n"
CUT_SHORT = "closed the connection before its answer ended"
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n"))


def events_of(data: bytes, cuts: list[int]) -> list[str]:
    """Read the body of an answer in pieces."""
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [*events(data[start:stop] for start, stop in itertools.pairwise(places))]


@given(
    texts=st.lists(st.lists(TEXT, min_size=1, max_size=3), max_size=5),
    cuts=st.lists(st.integers(0, 10_000), max_size=12),
    newline=st.sampled_from([b"\n", b"\r\n"]),
    noise=st.booleans(),
)
def test_any_cut_gives_the_same_events(
    texts: list[list[str]], cuts: list[int], newline: bytes, noise: bool
) -> None:
    body = b""
    for lines in texts:
        body += (b": ping" + newline + newline + b"event: delta" + newline) * noise
        body += b"".join(b"data: " + line.encode() + newline for line in lines) + newline
    assert events_of(body, cuts) == ["\n".join(lines) for lines in texts]


@given(data=st.binary(), cuts=st.lists(st.integers(0, 200)))
def test_any_bytes_are_read(data: bytes, cuts: list[int]) -> None:
    assert events_of(data, cuts) == events_of(data, [])


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", ("127.0.0.1:8000", "http://127.0.0.1:8000")),
        ("http://localhost:8000/v1/", ("localhost:8000", "http://localhost:8000")),
        ("https://example.com/llm/v1", ("example.com", "https://example.com/llm")),
        ("http://[::1]:9", ("[::1]:9", "http://[::1]:9")),
    ],
)
def test_urls(url: str, expected: tuple[str, str]) -> None:
    server = find_server(url, "a-key")
    assert (server.name, server.url) == expected
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
        headers = find_server("http://a:1", given_key).headers
        assert headers["Authorization"] == f"Bearer {sent}"
    monkeypatch.delenv("OPENAI_API_KEY")
    assert "Authorization" not in find_server("http://a:1").headers
    with pytest.raises(ConfigError, match="printable ASCII"):
        find_server("http://a:1", "two\r\nX-Lines: 1")


def ask(script: Script) -> list[str]:
    """Post a request, and return the events of its answer."""
    with WireServer(script) as wire:
        return list(server_client.stream(find_server(wire.url), "/v1/completions", {"n": 1}))


def test_events_come_as_they_were_sent() -> None:
    values = [text_event("Hé"), text_event("llo 👋\u2028", "stop"), usage_event(3, 2)]
    for cut in (0, 1):
        *got, done = ask(lambda _, cut=cut: streamed(*((0, v) for v in values), cut=cut))  # type: ignore[misc]
        assert done == "[DONE]"
        assert [json.loads(data) for data in got] == values


@pytest.mark.parametrize(
    ("steps", "error", "message"),
    [
        ([(0.0, whole(400, {"error": {"message": "n is bad"}}))], InvalidRequestError, "n is bad"),
        ([(0.0, whole(503, {"error": {"message": "full"}}))], ServerError, "answers 503: full"),
        ([(0.0, whole(404, {"detail": "Not Found"}))], ServerError, "answers 404: Not Found"),
        ([(0.0, whole(200, {"choices": []}))], ServerError, "does not stream"),
        ([], ServerError, "closed the connection before"),
        ([(0.0, HEAD + chunk(event("a"))), (0.0, b"5\r\nab"), CLOSE], ServerError, CUT_SHORT),
        ([(0.0, HEAD_OF_9 + b"ab"), CLOSE], ServerError, CUT_SHORT),
        ([(0.0, HEAD + b"zz\r\n")], ServerError, "does not speak HTTP: illegal chunk header"),
        ([(0.0, HEAD + chunk(event("a"))), (0.1, b"zz\r\n")], ServerError, "illegal chunk"),
        ([(0.0, b"SSH-2.0-OpenSSH\r\n\r\n")], ServerError, "does not speak HTTP: .*SSH-2.0"),
        ([(0.0, REDIRECT)], ServerError, "answers 302"),
    ],
)
def test_errors_of_a_server(steps: list[Step], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ask(lambda _: steps)


def test_a_line_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_client, "MAX_BYTES", 100)
    with pytest.raises(ServerError, match="an event of more than 100 bytes"):
        ask(lambda _: [(0.0, HEAD + chunk(b"x" * 200))])
    assert [*events([b"data: " + b"x" * 99 + b"\n\n" + b"data: 1\n\n" * 99])][1:] == ["1"] * 99


def test_proxies_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert ask(lambda _: streamed((0, text_event("a"))))[-1] == "[DONE]"


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
        [{"delta": {}, "finish_reason": 1}],
    ],
)
def test_events_of_an_odd_form_are_refused(choices: Any) -> None:
    with pytest.raises(ServerError, match='an event of an unknown form: {"choices": '):
        choice_of({"choices": choices})


def test_choices_of_events() -> None:
    for empty in ({}, {"choices": None}, {"choices": []}):
        assert choice_of(empty) == ("", "", None)
    for delta, expected in (
        ({"content": "a"}, ("a", "", "stop")),
        ({"content": None, "reasoning": "b"}, ("", "b", "stop")),
        ({"reasoning_content": "b", "content": "c"}, ("c", "b", "stop")),
        (None, ("", "", "stop")),
    ):
        choice = {"delta": delta, "finish_reason": "stop"}
        assert choice_of({"choices": [choice]}) == expected


def unused_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def test_a_server_that_is_not_there() -> None:
    server = find_server(f"http://127.0.0.1:{unused_port()}")
    with pytest.raises(ServerError, match="cannot reach 127.0.0.1:.*refused"):
        server_client.model_card(server)
    nowhere = find_server("http://no-such-host.invalid")
    with pytest.raises(ServerError, match="(?i)cannot reach no-such-host.invalid: .*name"):
        server_client.model_card(nowhere)
    with pytest.raises(ServerError, match="cannot reach 127.0.0.1:.*refused"):
        list(server_client.stream(server, "/v1/completions", {}))


def test_model_card(monkeypatch: pytest.MonkeyPatch) -> None:
    with WireServer(lambda _: []) as wire:
        assert server_client.model_card(find_server(wire.url + "/v1"))["id"] == "wire-model"
        encoder = {"id": "encoder", "chats": False}
        for cards, name in (
            ([encoder, 3, {"id": "llm", "chats": True}], "llm"),
            ([encoder], "encoder"),
        ):
            monkeypatch.setitem(MODELS, "data", cards)
            assert server_client.model_card(find_server(wire.url + "/v1"))["id"] == name
    with (
        WireServer(lambda _: [(0.0, whole(200, {}))]) as wire,
        pytest.raises(ServerError, match="lists no model at /v1/models"),
    ):
        server_client.model_card(find_server(wire.url + "/other"))
