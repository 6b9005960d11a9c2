"""Frames of streams, and how they reach the connection: over real sockets."""

import json
import socket
import time
from typing import Any

import anthropic
import openai
import pytest

pytest.importorskip("fastapi")

from nanovllm.apps.server.error_bodies import APIError
from nanovllm.apps.server.sse import TextFrames, error_frames, frame
from nanovllm.engine.reader import Reader
from nanovllm.errors import EngineDeadError
from nanovllm.outputs import RequestOutput
from tests.server.conftest import Running
from tests.wire_server import WireServer

pytestmark = pytest.mark.usefixtures("idle_afterwards")

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXTS = [
    "",
    " a",
    'a "quoted" \\ word',
    "\n\r\t\b\f\x00\x1f\x7f",
    "é🦊\u2028\ufffd",
    TextFrames.TEXT,
]


def chunk(text: str, name: str) -> dict[str, Any]:
    return {"id": name, "model": name, "choices": [{"index": 3, "text": text, "logprobs": None}]}


@pytest.mark.parametrize("name", ["a", TextFrames.TEXT, f'"{TextFrames.TEXT}"'])
def test_frames_of_text_are_those_of_whole_chunks(name: str) -> None:
    frames = TextFrames(chunk(TextFrames.TEXT, name))
    for text in TEXTS:
        found, wanted = frames.frame(text), frame(chunk(text, name))
        assert found.count("\n") == wanted.count("\n") == 2
        assert json.loads(found[6:]) == json.loads(wanted[6:])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/messages"])
def test_its_client_raises_the_error_that_ends_a_stream(path: str) -> None:
    """Symptom: of a stream of /v1/messages that broke off, Anthropic's client made an answer."""
    body = error_frames(APIError(503, "it broke"), path)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n"
    with WireServer(lambda _: [(0.0, head % len(body) + body)]) as wire:
        claude = anthropic.Anthropic(base_url=wire.url, api_key="x")
        client = openai.OpenAI(base_url=wire.url, api_key="x")
        ask: dict[str, Any] = {
            "/v1/completions": lambda: client.completions.create(model="a", prompt="", stream=True),
            "/v1/responses": lambda: client.responses.create(model="a", input="", stream=True),
            "/v1/messages": lambda: claude.messages.create(
                model="a", max_tokens=1, messages=[], stream=True
            ),
        }
        stream = ask[path]()
        with pytest.raises((openai.APIError, anthropic.APIError), match="it broke"):
            list(stream)


def text_of(body: str) -> list[str]:
    """Return the text of each choice of a stream."""
    texts: dict[int, str] = {}
    for line in body.replace("data: [DONE]", "").splitlines():
        if line.startswith("data: "):
            for choice in json.loads(line[6:])["choices"]:
                new = choice.get("text") or choice.get("delta", {}).get("content") or ""
                texts[choice["index"]] = texts.get(choice["index"], "") + new
    return [text for _, text in sorted(texts.items())]


def body_for(path: str, **options: Any) -> dict[str, Any]:
    what = {"messages": [{"role": "user", "content": "What is a block?"}]}
    body: dict[str, Any] = what if path == CHAT else {"prompt": "A block"}
    return body | {"max_tokens": 40, "ignore_eos": True, "temperature": 0.7, "seed": 1} | options


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_deltas_that_are_waited_for_go_to_the_connection_at_once(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """They wake no task; and the stream says what the whole answer says."""
    engine = server.state.llm.engine
    run_step = engine.run_step

    def slow_step() -> None:  # so that each delta is waited for
        time.sleep(0.005)
        run_step()

    monkeypatch.setattr(engine, "run_step", slow_step)
    num_taken, has_taken = 0, Reader._has_taken

    def counting(reader: Reader, output: RequestOutput) -> bool:
        nonlocal num_taken
        found = has_taken(reader, output)
        num_taken += found
        return found

    monkeypatch.setattr(Reader, "_has_taken", counting)
    streamed = server.send(path, body_for(path, stream=True, n=3))
    assert streamed.body.endswith("data: [DONE]\n\n")
    choices = server.send(path, body_for(path, n=3)).body["choices"]
    whole = [choice.get("text") or choice["message"]["content"] for choice in choices]
    assert text_of(streamed.body) == whole
    assert 10 < num_taken < 41  # of 41 deltas the first and the last wake the task


@pytest.mark.parametrize("kind", [RuntimeError, EngineDeadError])
def test_a_failure_to_make_a_frame_ends_its_stream_alone(
    server: Running,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: type[Exception],
) -> None:
    """The log has a traceback only of an error that is not told to anyone."""

    def fail(frames: TextFrames, text: str) -> str:
        raise kind("no frame")

    monkeypatch.setattr(TextFrames, "frame", fail)
    streamed = server.send(COMPLETIONS, body_for(COMPLETIONS, stream=True))
    events = [line for line in streamed.body.splitlines() if line]
    assert json.loads(events[-2][6:])["error"]["type"] == "server_error"
    assert events[-1] == "data: [DONE]"
    assert "a stream ended with an error" in caplog.text
    assert ("Traceback" in caplog.text) is (kind is RuntimeError)
    monkeypatch.undo()
    assert server.send(COMPLETIONS, body_for(COMPLETIONS)).status == 200


def test_a_client_of_http_1_0_gets_no_chunks(server: Running) -> None:
    body = json.dumps(body_for(COMPLETIONS, stream=True)).encode()
    with socket.create_connection((server.host, server.port)) as connection:
        head = f"POST {COMPLETIONS} HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json"
        connection.sendall(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = connection.makefile("rb").read().decode()
    head, _, events = answer.partition("\r\n\r\n")
    assert "transfer-encoding" not in head.lower()
    assert events.startswith("data: {")
    assert text_of(events) == text_of(
        server.send(COMPLETIONS, body_for(COMPLETIONS, stream=True)).body
    )
