"""`nanovllm chat --url`: the same conversation, with the answers of a server."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from nanovllm.apps.cli import main as cli, repl
from nanovllm.apps.cli.sources import AnswerPiece
from tests.helpers import environment
from tests.wire_server import Asked, Script, Step, WireServer, chat_event, streamed, whole

Chat = Callable[..., tuple[int, list[str], str]]


@pytest.fixture
def chat(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Chat:
    """Send lines to a server; return the status, the lines written and standard error."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def chat(wire: WireServer, *arguments: str, lines: list[str]) -> tuple[int, list[str], str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        status = cli.main(["chat", "--url", wire.url, *arguments])
        shown = capsys.readouterr()
        return status, shown.out.splitlines(), shown.err

    return chat


def echo(asked: Asked) -> list[Step]:
    """Answer with the last message, in capitals and word by word."""
    words = asked.body["messages"][-1]["content"].upper().split(" ")
    pieces = [word + " " * (word is not words[-1]) for word in words]
    return streamed(
        (0, chat_event(role="assistant", content="")),
        *((0, chat_event(content=piece)) for piece in pieces),
        (0, chat_event("stop")),
    )


def messages_of(wire: WireServer) -> list[list[tuple[str, str]]]:
    return [
        [(message["role"], message["content"]) for message in asked.body["messages"]]
        for asked in wire.asked
        if asked.method == "POST"
    ]


def test_a_conversation_and_its_commands(chat: Chat, tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    lines = ["one two", "three", f"/save {saved}", "/reset", "/system", "four", "/rest", "/exit"]
    with WireServer(echo) as wire:
        flags = ["--system", "Be loud.", "--temperature", "0", "--seed", "5", "--api-key", "key"]
        flags += ["--extra-args", '{"no_digits": true}']
        flags += ["--chat-template-kwargs", '{"enable_thinking": false}']
        status, shown, err = chat(wire, *flags, lines=[*lines, "never sent"])
        first = wire.asked[1]
        assert messages_of(wire) == [
            [("system", "Be loud."), ("user", "one two")],
            [
                ("system", "Be loud."),
                ("user", "one two"),
                ("assistant", "ONE TWO"),
                ("user", "three"),
            ],
            [("user", "four")],
        ]
    assert (status, shown) == (0, ["ONE TWO", "THREE", "FOUR"])
    assert err == "there is no command /rest; did you mean '/reset'?\n"
    assert first.path == "/v1/chat/completions"
    assert first.headers["authorization"] == "Bearer key"
    fields = {name: value for name, value in first.body.items() if name != "messages"}
    assert fields == {
        "model": "wire-model",
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
        events = [(0, chat_event(content="a ")) for _ in range(3)]
        usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 7}}
        return streamed(*events, (0, chat_event("stop")), (0, usage))

    for module in ("repl", "sources"):
        monkeypatch.setattr(f"nanovllm.apps.cli.{module}.is_interactive", lambda: True)
    with WireServer(script) as wire:
        _, shown, err = chat(wire, lines=["hi", "/set temperature 0.5", "/regen"])
        bodies = [asked.body for asked in wire.asked if asked.method == "POST"]
    assert err == ""
    assert [body["stream_options"] for body in bodies] == [{"include_usage": True}] * 2
    assert [body.get("temperature") for body in bodies] == [None, 0.5]
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
        ([(0.5, "a", 1)], "1 token, the first after 0.5 s"),
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


def test_a_model_may_be_named(chat: Chat) -> None:
    with WireServer(echo) as wire:
        assert chat(wire, "other-model", lines=["hi"])[1] == ["HI"]
        assert [asked.body["model"] for asked in wire.asked if asked.method == "POST"] == [
            "other-model"
        ]


def test_reasoning_is_shown_and_not_sent_back(chat: Chat) -> None:
    def script(_: Asked) -> list[Step]:
        return streamed(
            (0, chat_event(role="assistant", reasoning_content="Let me ")),
            (0, chat_event(reasoning="think.")),
            (0, chat_event(content="Yes")),
            (0, chat_event(content=".")),
            (0, chat_event("stop")),
        )

    with WireServer(script) as wire:
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
        (
            [(0.0, whole(401, {"error": {"message": "wrong API key"}}))],
            "the server answers 401: wrong API key",
        ),
        ([], "the server closed the connection before its answer ended"),
        (
            streamed((0, chat_event(content="Half")), (0, {"error": {"message": "engine\ndied"}})),
            "the server reports an error: engine died",
        ),
        (
            streamed((0, chat_event(content="Half")), (0, {"choices": [{"delta": ["x"]}]})),
            'the server sends an event of an unknown form: {"choices": [{"delta": ["x"]}]}',
        ),
        (
            streamed((0, chat_event(content="Half"))),
            "the server broke off its answer: no reason is given",
        ),
        (
            streamed((0, chat_event("abort", content="Half"))),
            "the server broke off its answer: abort",
        ),
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
    assert err == f"{message}\n"


def test_ctrl_c_ends_an_answer_and_its_connection(chat: Chat) -> None:
    def script(asked: Asked) -> list[Step]:
        if asked.body["messages"][-1]["content"] != "wait":
            return echo(asked)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        waiting: list[tuple[float, object]] = [(0.05, chat_event(content=""))] * 600
        return streamed((0, chat_event(content="I wait")), *waiting)

    with WireServer(script) as wire:
        status, shown, err = chat(wire, lines=["wait", "go on"])
        assert messages_of(wire) == [[("user", "wait")], [("user", "go on")]]
        assert wire.hung_up.wait(10), "the server learns that nobody reads"
    assert (status, shown, err) == (0, ["I wait", "GO ON"], "")


def test_ctrl_c_ends_the_wait_for_an_answer(chat: Chat) -> None:
    """A queue may be long: nothing has come yet."""

    def script(asked: Asked) -> list[Step]:
        if asked.body["messages"][-1]["content"] != "wait":
            return echo(asked)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        return [(30.0, b"")]

    with WireServer(script) as wire:
        assert chat(wire, lines=["wait", "go on"]) == (0, ["", "GO ON"], "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "localhost:8000"], "the server's URL must be like http://127.0.0.1:8000"),
        (["--base-url", "localhost:8000"], "the server's URL must be like http://127.0.0.1:8000"),
        (["--url", "http://127.0.0.1:1"], "cannot reach 127.0.0.1:1: Connection refused"),
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
    script: Script = echo
    with WireServer(script) as wire:
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
