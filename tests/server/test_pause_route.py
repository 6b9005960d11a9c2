"""A pause or sleep that awaits requests: the server goes on meanwhile, and loses none."""

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")

from nanovllm import AsyncLLM, demo_model
from tests.helpers import SlowSteps, wait_until
from tests.server.conftest import Reply, Running, running

PROMPT = {"prompt": "A KV cache is", "temperature": 0, "ignore_eos": True}
SHORT = {**PROMPT, "max_tokens": 4}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """Of an engine whose steps are slow."""
    llm = AsyncLLM(demo_model.MODEL, max_model_len=512, num_kvcache_blocks=64, device="cpu")
    llm.engine.observers.append(SlowSteps(0.02))
    with running(llm, dev_mode=True) as found:
        yield found
    llm.shutdown()


class Call:
    """A request that another thread sends."""

    def __init__(self, server: Running, path: str, body: Any = b"") -> None:
        self._thread = threading.Thread(target=self._send, args=(server, path, body))
        self._thread.start()

    def _send(self, server: Running, path: str, body: Any) -> None:
        self._reply = server.send(path, body)

    @property
    def is_waiting(self) -> bool:
        return self._thread.is_alive()

    def reply(self) -> Reply:
        self._thread.join(30)
        assert not self.is_waiting
        return self._reply


class Client:
    """One that may hang up; the engine has what it asks for when this returns."""

    def __init__(self, server: Running, path: str, body: str = "") -> None:
        engine = server.state.llm.engine
        before = set(engine.output_processor.requests)
        self._socket = socket.create_connection((server.host, server.port), timeout=30)
        self._socket.sendall(
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        if body:
            wait_until(lambda: not before.issuperset(engine.output_processor.requests), 20)

    def hang_up(self) -> None:
        self._socket.close()

    def answer(self) -> str:
        with self._socket:
            return self._socket.recv(2**16).decode()


def long_request(server: Running) -> Client:
    body = '{"prompt": "A KV cache is", "temperature": 0, "ignore_eos": true, "max_tokens": 480}'
    return Client(server, "/v1/completions", body)


def is_awaited(server: Running, num_calls: int = 1) -> bool:
    control = server.state.llm.engine.weights
    return control is not None and len(control._waiting) == num_calls


def metric(server: Running, name: str) -> float:
    lines = str(server.send("/metrics").body).splitlines()
    return float(next(line for line in lines if line.startswith(f"{name}{{")).split()[-1])


def test_the_server_goes_on_while_a_pause_waits(server: Running) -> None:
    """Two pauses wait for one request, which a client gives up; what came meanwhile is kept."""
    expected = server.send("/v1/completions", SHORT).body["choices"][0]["text"]
    client = long_request(server)
    pauses = [Call(server, "/pause?mode=wait") for _ in range(2)]
    wait_until(lambda: is_awaited(server, 2), 20)
    second, third = Call(server, "/v1/completions", SHORT), long_request(server)
    wait_until(lambda: metric(server, "vllm:num_requests_waiting") == 2, 20)
    assert metric(server, "vllm:num_requests_running") == 1
    for path in ("/health", "/v1/models"):
        assert server.send(path).status == 200
    assert server.send("/is_paused").body == {"is_paused": False}
    third.hang_up()
    wait_until(lambda: metric(server, "vllm:num_requests_waiting") == 1, 20)
    assert all(pause.is_waiting for pause in pauses)
    client.hang_up()
    assert [pause.reply().body for pause in pauses] == [{"status": "paused"}] * 2
    assert server.send("/is_paused").body == {"is_paused": True}
    assert second.is_waiting
    assert server.send("/resume", b"").status == 200
    assert second.reply().body["choices"][0]["text"] == expected


@pytest.mark.parametrize("was_paused", [False, True])
def test_a_client_that_leaves_gives_up_its_pause(server: Running, was_paused: bool) -> None:
    first = long_request(server)
    if was_paused:
        assert server.send("/pause?mode=keep", b"").status == 200
    client = Client(server, "/pause?mode=wait")
    wait_until(lambda: is_awaited(server), 20)
    second = Call(server, "/v1/completions", SHORT)
    wait_until(lambda: metric(server, "vllm:num_requests_waiting") == 1, 20)
    client.hang_up()
    wait_until(lambda: is_awaited(server, 0), 20)
    assert server.send("/is_paused").body == {"is_paused": was_paused}
    if was_paused:
        assert second.is_waiting
        assert server.send("/resume", b"").status == 200
    assert second.reply().status == 200
    first.hang_up()


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/resume", 400, "the pause did not begin: a resume came"),
        ("/pause?mode=keep", 200, "paused"),
        ("/pause?mode=abort", 200, "paused"),
    ],
)
def test_another_call_ends_the_wait(server: Running, path: str, status: int, message: str) -> None:
    first = long_request(server)
    pause = Call(server, "/pause?mode=wait")
    wait_until(lambda: is_awaited(server), 20)
    assert server.send(path, b"").status == 200
    reply = pause.reply()
    assert (reply.status, message in str(reply.body)) == (status, True)
    assert server.send("/is_paused").body == {"is_paused": status == 200}
    if "abort" in path:
        assert '"abort"' in first.answer()
    first.hang_up()
    server.send("/resume", b"")
    assert server.send("/v1/completions", SHORT).status == 200


def test_the_server_goes_on_before_it_sleeps(server: Running) -> None:
    """Requests that come are refused; a pause that waits as well keeps its own."""
    first = long_request(server)
    pause = Call(server, "/pause?mode=wait")
    wait_until(lambda: is_awaited(server), 20)
    kept = Call(server, "/v1/completions", SHORT)
    wait_until(lambda: metric(server, "vllm:num_requests_waiting") == 1, 20)
    sleep = Call(server, "/sleep?level=1&mode=wait")
    wait_until(lambda: is_awaited(server, 2), 20)
    refused = server.send("/v1/completions", SHORT)
    assert (refused.status, "about to sleep" in refused.error["message"]) == (503, True)
    first.hang_up()
    assert (pause.reply().status, sleep.reply().status) == (200, 200)
    assert server.send("/is_sleeping").body == {"is_sleeping": True}
    assert server.send("/wake_up", b"").status == 200
    assert kept.is_waiting
    assert server.send("/resume", b"").status == 200
    assert kept.reply().status == 200


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_requests_that_come_in_a_pause_are_refused_or_kept(server: Running, mode: str) -> None:
    """As in vLLM 0.33; before, they waited without an answer."""
    assert server.send(f"/pause?mode={mode}", b"").status == 200
    for _ in range(2):
        refused = server.send("/v1/completions", SHORT)
        assert (refused.status, "POST /resume" in refused.error["message"]) == (503, True)
        assert server.send("/ready").status == 503
    assert server.send("/pause?mode=keep", b"").status == 200
    kept = Call(server, "/v1/completions", SHORT)
    wait_until(lambda: metric(server, "vllm:num_requests_waiting") == 1, 20)
    assert server.send("/ready").status == 200
    assert server.send("/resume", b"").status == 200
    assert kept.reply().status == 200


def test_a_pause_of_nothing(server: Running) -> None:
    for mode in ("abort", "wait", "keep", "wait"):
        start = time.monotonic()
        assert server.send(f"/pause?mode={mode}", b"").body == {"status": "paused"}
        assert time.monotonic() - start < 10
    for _ in range(2):
        assert server.send("/resume", b"").body == {"status": "resumed"}
    assert server.send("/v1/completions", SHORT).status == 200
