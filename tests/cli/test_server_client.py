"""`nanovllm chat --url`: any cut of the bytes, what a server may do wrong, and Ctrl-C."""

import io
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from nanovllm.apps.cli import main as cli, repl, server_client
from nanovllm.apps.cli.repl import AnswerPiece
from nanovllm.apps.cli.server_client import events, find_server, model_card, read_event
from nanovllm.errors import ConfigError, ServerError
from tests.helpers import environment
from tests.wire_server import (
    CLOSE,
    HEAD,
    MODELS,
    Asked,
    Step,
    WireServer,
    chat_event,
    chunk,
    event,
    streamed,
    whole,
)

REDIRECT = b"HTTP/1.1 302 Found\r\nLocation: http://a/\r\nContent-Length: 0\r\n\r\n"
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n"))
HALF = (0, chat_event(content="Half"))
Chat = Callable[..., tuple[int, list[str], str]]


@pytest.fixture
def chat(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Chat:
    """Send lines to a server; return the status, the lines written and standard error."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # which is not used

    def chat(wire: WireServer, *arguments: str, lines: list[str]) -> tuple[int, list[str], str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        status = cli.main(["chat", "--url", wire.url, *arguments])
        shown = capsys.readouterr()
        return status, shown.out.splitlines(), shown.err

    return chat


def echo(asked: Asked) -> list[Step]:
    """Answer with the last message, in capitals, word by word and the bytes one by one."""
    words = re.split("(?<= )", asked.body["messages"][-1]["content"].upper())
    pieces = [(0, chat_event(content=word)) for word in words]
    return streamed((0, chat_event(role="assistant")), *pieces, (0, chat_event("stop")), cut=1)


def messages_of(wire: WireServer) -> list[list[tuple[str, str]]]:
    return [
        [(message["role"], message["content"]) for message in asked.body["messages"]]
        for asked in wire.asked
        if asked.method == "POST"
    ]


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
    places = sorted({0, len(body), *(cut % (len(body) + 1) for cut in cuts)})
    found = events(body[start:stop] for start, stop in itertools.pairwise(places))
    assert [*found] == ["\n".join(lines) for lines in texts]


def test_a_line_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_client, "MAX_BYTES", 100)
    with pytest.raises(ServerError, match="an event of more than 100 bytes"):
        [*events([b"x" * 60, b"x" * 60])]
    assert [*events([b"data: " + b"x" * 99 + b"\n\n" + b"data: 1\n\n" * 99])][1:] == ["1"] * 99


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://localhost:8000/v1/", "http://localhost:8000"),
        ("https://example.com/llm/v1", "https://example.com/llm/"),
        ("http://[::1]:9", "http://[::1]:9"),
    ],
)
def test_urls(url: str, expected: str) -> None:
    assert str(find_server(url, "a-key").base_url) == expected


@pytest.mark.parametrize(
    "url",
    [
        *("", "localhost:8000", "ftp://a", "http://", "http://a b", "http://a:x", "http://a:99999"),
        *(
            "http://user:secret@a",
            "http://a\r\nX: y",
            "http://[::1",
            "http://[v1.x]/",
            "http://a\x01b",
            "http://ü-.de",
            "http://a/?b=c",
            "http://a/#b",
        ),
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


@pytest.mark.parametrize(
    "choices",
    [
        *({"a": 1}, "x", 1, ["x"], [None], [{"delta": "x"}], [{"delta": ["x"]}]),
        *([{"delta": {"content": 5}}], [{"delta": {"reasoning": {"a": 1}}}]),
        [{"delta": {}, "finish_reason": 1}],
    ],
)
def test_events_of_an_odd_form_are_refused(choices: Any) -> None:
    with pytest.raises(ServerError, match='an event of an unknown form: {"choices": '):
        read_event(json.dumps({"choices": choices}))


def test_what_events_say() -> None:
    for empty in ({}, {"choices": None}, {"choices": []}):
        assert read_event(json.dumps(empty)) == ("", "", None, 0)
    for delta, expected in (
        ({"content": "a\u2028"}, ("a\u2028", "", "stop", 0)),
        ({"content": None, "reasoning": "b"}, ("", "b", "stop", 0)),
        ({"reasoning_content": "b", "content": "c"}, ("c", "b", "stop", 0)),
        (None, ("", "", "stop", 0)),
    ):
        choice = {"delta": delta, "finish_reason": "stop"}
        assert read_event(json.dumps({"choices": [choice]})) == expected
    with pytest.raises(ServerError, match="unknown form: not JSON"):
        read_event("not JSON")


def test_a_server_that_is_not_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        unused = free.getsockname()[1]
    for url, reason in (
        (f"http://127.0.0.1:{unused}", "cannot reach http://127.0.0.1:.*refused"),
        ("http://no-such-host.invalid", "(?i)cannot reach http://no-such-host.invalid: .*name"),
    ):
        with pytest.raises(ServerError, match=reason):
            model_card(find_server(url))


def test_model_card(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = {"id": "encoder", "chats": False}
    with WireServer(lambda _: []) as wire:
        for cards, name in (
            ([encoder, 3, {"id": "llm", "chats": True}], "llm"),
            ([encoder], "encoder"),
        ):
            monkeypatch.setitem(MODELS, "data", cards)
            assert model_card(find_server(wire.url + "/v1"))["id"] == name
        monkeypatch.setitem(MODELS, "data", [])
        with pytest.raises(ServerError, match="lists no model at /v1/models"):
            model_card(find_server(wire.url))


def test_a_conversation_and_its_commands(chat: Chat, tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    lines = ["one two", "three", f"/save {saved}", "/reset", "/system", "four", "/rest", "/exit"]
    flags = ["--system", "Be loud.", "--temperature", "0", "--seed", "5", "--api-key", "key"]
    flags += ["--extra-args", '{"no_digits": true}', "other-model"]
    flags += ["--chat-template-kwargs", '{"enable_thinking": false}']
    with WireServer(echo) as wire:
        status, shown, err = chat(wire, *flags, lines=[*lines, "never sent"])
        system, first = ("system", "Be loud."), ("user", "one two")
        assert messages_of(wire) == [
            [system, first],
            [system, first, ("assistant", "ONE TWO"), ("user", "three")],
            [("user", "four")],
        ]
        asked = wire.asked[1]
    assert (status, shown) == (0, ["ONE TWO", "THREE", "FOUR"])
    assert err == "there is no command /rest; did you mean '/reset'?\n"
    assert asked.path == "/v1/chat/completions"
    assert asked.headers["authorization"] == "Bearer key"
    assert {name: value for name, value in asked.body.items() if name != "messages"} == {
        "model": "other-model",
        "stream": True,
        "temperature": 0,
        "seed": 5,
        "vllm_xargs": {"no_digits": True},
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert len(json.loads(saved.read_text())) == 5


def test_a_terminal_gets_the_speed(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is asked for the number of tokens, which it tells at the end."""

    def script(asked: Asked) -> list[Step]:
        usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 7}}
        return streamed(*[(0, chat_event(content="a "))] * 3, (0, chat_event("stop")), (0, usage))

    for module in ("repl", "server_client"):
        monkeypatch.setattr(f"nanovllm.apps.cli.{module}.is_interactive", lambda: True)
    with WireServer(script) as wire:
        _, shown, err = chat(wire, lines=["hi"])
        assert wire.asked[-1].body["stream_options"] == {"include_usage": True}
    assert err == ""
    # No speed is shown if all come at once.
    told = r"\(7 tokens, the first after \d+\.\d s(, \d+ tokens/s)?\)"
    assert re.fullmatch(told, shown[1])


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        # A server tells the number at the end only: six of the tokens came after the first text.
        ([(1.25, "a ", 0), (2.0, "b ", 0), (3.25, "", 7)], "7 tokens, the first after 1.2 s, 3 "),
        ([(1.25, "a", 2), (2.0, "b", 2), (2.75, "c", 1)], "5 tokens, the first after 1.2 s, 2 "),
        ([(0.5, "a", 1), (0.509, "b", 9)], "10 tokens, the first after 0.5 s"),
        ([(0.5, "a", 0)], ""),
    ],
)
def test_the_speed_is_of_the_tokens_after_the_first_text(
    monkeypatch: pytest.MonkeyPatch, pieces: list[tuple[float, str, int]], shown: str
) -> None:
    times = iter([0.0, *(time for time, _, _ in pieces)])
    monkeypatch.setattr(repl, "time", SimpleNamespace(monotonic=lambda: next(times)))
    timer = repl._Timer()
    texts = list(timer.timed(AnswerPiece(text, num_tokens) for _, text, num_tokens in pieces))
    assert texts == [text for _, text, _ in pieces]
    assert timer.speed() == shown + "tokens/s" * shown.endswith(" ")


def test_reasoning_is_shown_and_not_sent_back(chat: Chat) -> None:
    thoughts = [{"reasoning_content": "Let me "}, {"reasoning": "think."}]
    deltas = [*thoughts, {"content": "Yes"}, {"content": "."}]
    answer = streamed(*((0, chat_event(**delta)) for delta in deltas), (0, chat_event("stop")))
    with WireServer(lambda _: answer) as wire:
        _, shown, err = chat(wire, lines=["is it?", "sure?"])
        assert messages_of(wire)[1][1] == ("assistant", "Yes.")
    assert shown[:5] == ["<think>", "Let me think.", "</think>", "", "Yes."]
    assert err == ""


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (
            [(0.0, whole(400, {"error": {"message": "the prompt has 600 tokens"}}))],
            "the server answers 400: the prompt has 600 tokens (/reset starts a new conversation)",
        ),
        ([(0.0, whole(401, {"error": {"message": "bad key"}}))], "the server answers 401: bad key"),
        ([(0.0, whole(200, {"choices": []}))], "the server does not stream its answer: Content-T"),
        ([(0.0, REDIRECT)], "the server answers 302: without a reason"),
        ([], "the server broke off its answer: Server disconnected without sending a response."),
        (
            [(0.0, HEAD + chunk(event("[DONE]"))), (0.0, b"5\r\nab"), CLOSE],
            "the server broke off its answer: peer closed connection without sending complete",
        ),
        ([(0.0, HEAD + b"zz\r\n")], "the server broke off its answer: illegal chunk header"),
        ([(0.0, b"SSH-2.0-OpenSSH\r\n\r\n")], "the server broke off its answer: illegal status li"),
        (
            streamed(HALF, (0, {"error": {"message": "engine\ndied"}})),
            "the server reports an error: engine died",
        ),
        (
            streamed(HALF, (0, {"choices": [{"delta": ["x"]}]})),
            'the server sends an event of an unknown form: {"choices": [{"delta": ["x"]}]}',
        ),
        (streamed(HALF), "the server broke off its answer: no reason is given"),
        (streamed(HALF, (0, chat_event("abort"))), "the server broke off its answer: abort"),
    ],
)
def test_an_error_is_one_line_and_the_chat_goes_on(
    chat: Chat, steps: list[Step], message: str
) -> None:
    answers = iter([steps])

    def script(asked: Asked) -> list[Step]:
        return next(answers, None) or (echo(asked) if len(wire.asked) > 2 else [])

    with WireServer(script) as wire:
        status, shown, err = chat(wire, lines=["first", "second"])
        assert messages_of(wire)[-1] == [("user", "second")]
    assert (status, shown) == (0, ["Half"] * ("Half" in str(steps)) + ["SECOND"])
    assert err.startswith(message)
    assert err.count("\n") == 1


@pytest.mark.parametrize("begins", [True, False])
def test_ctrl_c_ends_an_answer_and_its_connection(chat: Chat, begins: bool) -> None:
    """Also while nothing has come yet: a queue may be long."""

    def script(asked: Asked) -> list[Step]:
        if asked.body["messages"][-1]["content"] != "wait":
            return echo(asked)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        waiting: list[tuple[float, object]] = [(0.05, chat_event(content=""))] * 600
        answer = streamed((0, chat_event(content="I wait")), *waiting)
        return answer if begins else [(30.0, b"")]

    with WireServer(script) as wire:
        done = chat(wire, lines=["wait", "go on"])
        assert messages_of(wire) == [[("user", "wait")], [("user", "go on")]]
        assert not begins or wire.hung_up.wait(10), "the server learns that nobody reads"
    assert done == (0, ["I wait" * begins, "GO ON"], "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--base-url", "localhost:8000"], "the server's URL must be like http://127.0.0.1:8000"),
        (["--url", "http://127.0.0.1:1"], "cannot reach http://127.0.0.1:1: [Errno 111] Connecti"),
        (["--url", "http://a", "--max-num-seqs", "4"], "--max-num-seqs is for a model here"),
        (["--url", "http://a", "--temperature", "-1"], "--temperature must be"),
    ],
)
def test_bad_usage_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert cli.main(["chat", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_it_starts_without_torch() -> None:
    code = """if True:
        import sys
        from nanovllm.apps.cli import main as cli
        status = cli.main(sys.argv[1:])
        sys.exit(status or "torch" in sys.modules or "numpy" in sys.modules)
    """
    with WireServer(echo) as wire:
        done = subprocess.run(
            [sys.executable, "-c", code, "chat", "--url", wire.url],
            input="hello\n",
            capture_output=True,
            text=True,
            timeout=60,
            env=environment(),
            check=False,
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, "HELLO\n", "")
