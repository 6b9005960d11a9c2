"""Routes that control the engine: pauses, sleep, new weights, profiles."""

import base64
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("fastapi")

from examples.weight_sender import WeightSender
from nanovllm import AsyncLLM, demo_model
from nanovllm.apps.server.server_options import ServerOptions
from nanovllm.errors import ConfigError
from tests.helpers import SlowSteps, wait_until
from tests.server.conftest import Reply, Running, running
from tests.training.weights import Weights, changed, read_weights

COMPLETE = "/v1/completions"
PROMPT = {"prompt": "A KV cache is", "temperature": 0, "ignore_eos": True}
LONG = {**PROMPT, "max_tokens": 200}
SHORT = {**PROMPT, "max_tokens": 4}


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    """An engine whose weights change."""
    llm = AsyncLLM(demo_model.MODEL, max_model_len=512, num_kvcache_blocks=512, device="cpu")
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def server(llm: AsyncLLM) -> Iterator[Running]:
    with running(llm, dev_mode=True) as found:
        yield found


@pytest.fixture(scope="module")
def slow() -> Iterator[Running]:
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


class Sent(Call):
    """One that the engine has, and runs unless it is paused."""

    def __init__(self, server: Running, body: dict[str, Any], path: str = COMPLETE) -> None:
        engine = server.state.llm.engine
        num_before = len(engine.output_processor.requests)
        super().__init__(server, path, body)

        def has_arrived() -> bool:
            if engine.is_paused:
                return len(engine.output_processor.requests) > num_before
            return any(seq.num_output_tokens for seq in list(engine.scheduler.running))

        wait_until(lambda: has_arrived() or not self.is_waiting, 20)

    def answer(self) -> Reply:
        reply = self.reply()
        assert reply.status == 200, reply.body
        return reply


def text_of(reply: Reply) -> str:
    return str(reply.body["choices"][0]["text"])


@pytest.mark.parametrize("clear_cache", ["true", "false"])
def test_a_pause_keeps_requests(server: Running, clear_cache: str) -> None:
    """What was kept, and what came in the pause, goes on as if nothing had been."""
    expected = [text_of(server.send(COMPLETE, body)) for body in (LONG, SHORT)]
    first = Sent(server, LONG)
    reply = server.send(f"/pause?mode=keep&clear_cache={clear_cache}", b"")
    assert (reply.status, reply.body) == (200, {"status": "paused"})
    assert server.send("/is_paused").body == {"is_paused": True}
    second = Sent(server, SHORT)
    time.sleep(0.2)
    assert first.is_waiting
    assert second.is_waiting
    assert server.send("/health").status == 200
    assert server.send("/resume", b"").body == {"status": "resumed"}
    assert [text_of(first.answer()), text_of(second.answer())] == expected
    assert server.send("/is_paused").body == {"is_paused": False}


@pytest.mark.parametrize(("mode", "reason"), [("abort", "abort"), ("wait", "length")])
def test_a_pause_ends_or_awaits_requests(server: Running, mode: str, reason: str) -> None:
    first = Sent(server, LONG)
    assert server.send(f"/pause?mode={mode}", b"").status == 200
    choice = first.answer().body["choices"][0]
    assert choice["finish_reason"] == reason
    assert server.send(COMPLETE, SHORT).status == 503
    assert server.send("/resume", b"").status == 200
    assert server.send(COMPLETE, SHORT).status == 200


def test_a_paused_engine_sleeps_with_its_requests(server: Running) -> None:
    expected = text_of(server.send(COMPLETE, LONG))
    first = Sent(server, LONG)
    assert server.send("/pause?mode=keep&clear_cache=false", b"").status == 200
    assert server.send("/sleep?level=1", b"").status == 200
    second = Sent(server, SHORT)
    for path in ("/resume", "/pause?mode=wait"):
        reply = server.send(path, b"")
        assert reply.status == 400
        assert "the engine sleeps (kv_cache and weights)" in reply.error["message"]
    assert server.send("/wake_up", b"").body["status"] == "awake"
    assert first.is_waiting
    assert second.is_waiting
    assert server.send("/resume", b"").status == 200
    assert text_of(first.answer()) == expected
    second.answer()


def test_the_prefix_cache_is_forgotten(server: Running) -> None:
    body = {**SHORT, "prompt": list(range(100, 400))}

    def num_cached() -> int:
        usage = server.send(COMPLETE, body).body["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    num_cached()
    assert num_cached() > 0
    assert server.send("/reset_prefix_cache", b"").body == {"success": True}
    assert num_cached() == 0
    first = Sent(server, LONG)
    assert server.send("/reset_prefix_cache", b"").body == {"success": False}
    path = "/reset_prefix_cache?reset_running_requests=true"
    assert server.send(path, b"").body == {"success": True}
    assert text_of(first.answer()) == text_of(server.send(COMPLETE, LONG))


def test_what_the_server_is(server: Running) -> None:
    info = server.send("/server_info?config_format=json").body["vllm_config"]
    assert info["model_config"]["dtype"] == "torch.bfloat16"
    assert info["model_config"]["max_model_len"] == 512
    assert info["lora_config"] is None
    assert info["parallel_config"]["data_parallel_size"] == 1


def test_wrong_modes(server: Running) -> None:
    reply = server.send("/pause?mode=freeze", b"")
    assert (reply.status, reply.error["param"]) == (400, "mode")
    assert "mode 'freeze' must be one of abort, wait, keep" in reply.error["message"]
    assert server.send("/is_paused").body == {"is_paused": False}
    assert server.send("/pause", b"", Origin="http://example.com").status == 403
    reply = server.send("/pause")
    assert (reply.status, "--dev-mode" in reply.error["message"]) == (405, False)


@pytest.mark.of_engines
def test_the_routes_need_the_option_and_a_key(async_llm: AsyncLLM) -> None:
    with running(async_llm, api_keys=("secret",)) as other:
        reply = other.send("/pause", b"", Authorization="Bearer secret")
        assert reply.status == 404
        assert "start the server with --dev-mode" in reply.error["message"]
    with running(async_llm, dev_mode=True, api_keys=("secret",)) as other:
        assert other.send("/pause", b"").status == 401
        assert other.send("/is_paused", Authorization="Bearer secret").status == 200
        for user in ("any:secret", ":secret"):  # as from http://any:secret@host
            token = base64.b64encode(user.encode()).decode()
            assert other.send("/is_paused", Authorization=f"Basic {token}").status == 200
        for token in (base64.b64encode(b"secret:").decode(), "%", ""):
            assert other.send("/is_paused", Authorization=f"Basic {token}").status == 401
    with pytest.raises(ConfigError, match="host '0.0.0.0' lets other machines in: give api_keys"):
        ServerOptions(dev_mode=True, host="0.0.0.0")
    assert ServerOptions(dev_mode=True, host="0.0.0.0", api_keys=("secret",)).dev_mode


# Weights


@pytest.fixture(scope="module")
def old() -> Weights:
    return read_weights(demo_model.MODEL)


@pytest.fixture
def sender(server: Running, old: Weights) -> Iterator[WeightSender]:
    """A trainer's end; afterwards the server has its first weights again, and runs."""
    sender = WeightSender(server.url, timeout=20)
    sender.init_weight_transfer()
    yield sender
    sender.init_weight_transfer()
    sender.send_weights(old.items(), "old")
    sender.destroy()
    sender.resume()


def test_weights_come_while_requests_are_kept(
    server: Running, sender: WeightSender, old: Weights
) -> None:
    """Each token after the pause is what the new weights make of the tokens before it."""
    path = "/inference/v1/generate"
    params = {"temperature": 0, "ignore_eos": True, "max_tokens": 200}
    body = {"token_ids": [40, 50, 60], "sampling_params": params}
    first = Sent(server, body, path)
    sender.pause()
    second = Sent(server, {**body, "token_ids": [70]}, path)
    sender.send_weights(changed(old, 1).items(), "step-1")
    assert server.send("/weight_info").body == {"weight_version": "step-1"}
    assert first.is_waiting
    sender.resume()
    choice = first.answer().body["choices"][0]
    tokens = choice["token_ids"]
    old_span, new_span = choice["weight_versions"]
    assert (old_span["start"], new_span["version"], new_span["end"]) == (0, "step-1", 200)
    num_old = new_span["start"]
    assert 0 < old_span["end"] == num_old < 200
    rest = {"token_ids": body["token_ids"] + tokens[:num_old]}
    rest["sampling_params"] = {**params, "max_tokens": 200 - num_old}
    assert server.send(path, rest).body["choices"][0]["token_ids"] == tokens[num_old:]
    assert [s["version"] for s in second.answer().body["choices"][0]["weight_versions"]] == [
        "step-1"
    ]


def test_wrong_orders(server: Running) -> None:
    assert server.send("/shutdown_weight_transfer_engine", b"").status == 200
    info = {"names": ["x"], "dtype_names": ["float32"], "shapes": [[1]]}
    reply = server.send("/update_weights", {"update_info": info})
    assert (reply.status, "init_weight_transfer_engine first" in str(reply.body)) == (400, True)
    assert "no update of the weights has begun" in str(server.send("/finish_weight_update", b""))
    assert server.send("/start_weight_update", {"is_checkpoint_format": True}).status == 200
    reply = server.send("/start_weight_update", b"")
    assert (reply.status, "an update of the weights runs" in str(reply.body)) == (400, True)
    reply = server.send(COMPLETE, SHORT)
    assert (reply.status, "an update of the weights runs" in str(reply.body)) == (503, True)
    sender = WeightSender(server.url, timeout=20)
    sender.init_weight_transfer()  # what nobody finishes is given up
    assert server.send(COMPLETE, SHORT).status == 200
    sender.destroy()


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.norm.weight", torch.zeros(3), "model.norm.weight"),
        ("model.norm.weight", torch.zeros(3, dtype=torch.int32), "'int32' must be one of float32"),
    ],
)
def test_wrong_tensors_change_nothing(
    server: Running, old: Weights, name: str, tensor: torch.Tensor, message: str
) -> None:
    before = text_of(server.send(COMPLETE, SHORT))
    sender = WeightSender(server.url, timeout=0.5)  # which it waits for
    sender.init_weight_transfer()
    with pytest.raises(RuntimeError) as found:
        sender.send_weights([("model.norm.weight", old["model.norm.weight"]), (name, tensor)])
    assert message in str(found.value)
    assert "the engine has its weights of before" in str(found.value)
    assert text_of(server.send(COMPLETE, SHORT)) == before
    sender.destroy()


def test_a_trainer_that_dies(server: Running, sender: WeightSender, old: Weights) -> None:
    """What it sent is in the engine, which takes no request until all has come."""

    def dying() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(changed(old, 2).items())[:-1]
        raise RuntimeError("out of memory")

    sender.pause()
    with pytest.raises(RuntimeError, match="out of memory"):
        sender.send_weights(dying())
    other = WeightSender(server.url, timeout=20)
    other.init_weight_transfer()
    info = {"names": [], "dtype_names": [], "shapes": []}
    for name, tensor in old.items():
        info["names"].append(name)
        info["dtype_names"].append("bfloat16")
        info["shapes"].append(list(tensor.shape))
    assert server.send("/start_weight_update", b"").status == 200
    replies: list[Reply] = []
    thread = threading.Thread(
        target=lambda: replies.append(server.send("/update_weights", {"update_info": info}))
    )
    thread.start()
    time.sleep(0.2)
    other.destroy()  # as when its process ends
    thread.join(20)
    assert replies[0].status == 500
    assert "the other end of the transfer has gone" in replies[0].error["message"]


def test_an_engine_without_weights_is_not_ready(server: Running, sender: WeightSender) -> None:
    """Symptom: /ready is 200, and each request gets status 400, as if it were wrong."""
    assert server.send("/sleep?level=2", b"").status == 200
    assert server.send("/wake_up", b"").status == 200
    for reply in (server.send("/ready"), server.send("/v1/embeddings", {"input": "a"})):
        assert (reply.status, reply.error["code"]) == (503, "not_ready")
        assert "must come by update_weights" in reply.error["message"]


def test_weights_of_a_directory(server: Running, sender: WeightSender, tmp_path: Path) -> None:
    path = "/update_weights_from_disk"
    before = text_of(server.send(COMPLETE, SHORT))
    reply = server.send(path, {"model_path": str(tmp_path)})
    assert (reply.status, reply.error["param"]) == (400, "model_path")
    assert "has no safetensors files" in reply.error["message"]
    reply = server.send(path, {"model_path": str(tmp_path), "flush_cache": False})
    assert (reply.status, reply.error["param"]) == (400, "flush_cache")
    weights = load_file(f"{demo_model.MODEL}/model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, tmp_path / "model.safetensors")
    reply = server.send(path, {"model_path": str(tmp_path)})
    assert (reply.status, reply.error["param"]) == (400, "model_path")
    assert "the files lack model.norm.weight" in reply.error["message"]
    body = {"model_path": demo_model.MODEL, "weight_version": "again", "load_format": None}
    first = Sent(server, LONG)
    assert server.send(path, body).body == {"success": True, "message": "Weights updated"}
    assert first.answer().body["choices"][0]["finish_reason"] == "length"
    assert server.send("/weight_info").body == {"weight_version": "again"}
    assert text_of(server.send(COMPLETE, SHORT)) == before


def test_what_cannot_be_joined(server: Running) -> None:
    info = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
    reply = server.send("/init_weight_transfer_engine", {"init_info": info})
    assert reply.status == 500
    assert "the trainer's store at 127.0.0.1:1 cannot be reached" in reply.error["message"]
    long = {**info, "master_address": "a" * 100_000}
    reply = server.send("/init_weight_transfer_engine", {"init_info": long})
    assert (reply.status, "cannot be reached" in reply.error["message"]) == (500, True)
    for change, param in (
        ({"packed": True}, "init_info.packed"),
        ({"rank_offset": 2}, "init_info.rank_offset"),
        ({"master_port": 0}, "init_info.master_port"),
    ):
        reply = server.send("/init_weight_transfer_engine", {"init_info": {**info, **change}})
        assert (reply.status, reply.error["param"]) == (400, param)
    assert server.send("/get_world_size").body == {"world_size": 1}
    for path in ("/start_weight_update", "/finish_weight_update"):
        assert server.send(path, [1]).status == 400
        assert server.send(path, {"x": 1}).status == 400


# Pauses of a slow engine


class Client:
    """One that may hang up; the engine has what it asks for when this returns."""

    def __init__(self, slow: Running, path: str, body: str = "") -> None:
        engine = slow.state.llm.engine
        before = set(engine.output_processor.requests)
        self._socket = socket.create_connection((slow.host, slow.port), timeout=30)
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


def long_request(slow: Running) -> Client:
    body = '{"prompt": "A KV cache is", "temperature": 0, "ignore_eos": true, "max_tokens": 480}'
    return Client(slow, COMPLETE, body)


def is_awaited(slow: Running, num_calls: int = 1) -> bool:
    control = slow.state.llm.engine.weights
    return control is not None and len(control._waiting) == num_calls


def metric(slow: Running, name: str) -> float:
    lines = str(slow.send("/metrics").body).splitlines()
    return float(next(line for line in lines if line.startswith(f"{name}{{")).split()[-1])


def test_the_server_goes_on_while_a_pause_waits(slow: Running) -> None:
    """Two pauses wait for one request, which a client gives up; what came meanwhile is kept."""
    expected = slow.send(COMPLETE, SHORT).body["choices"][0]["text"]
    client = long_request(slow)
    pauses = [Call(slow, "/pause?mode=wait") for _ in range(2)]
    wait_until(lambda: is_awaited(slow, 2), 20)
    second, third = Call(slow, COMPLETE, SHORT), long_request(slow)
    wait_until(lambda: metric(slow, "vllm:num_requests_waiting") == 2, 20)
    assert metric(slow, "vllm:num_requests_running") == 1
    for path in ("/health", "/v1/models"):
        assert slow.send(path).status == 200
    assert slow.send("/is_paused").body == {"is_paused": False}
    third.hang_up()
    wait_until(lambda: metric(slow, "vllm:num_requests_waiting") == 1, 20)
    assert all(pause.is_waiting for pause in pauses)
    client.hang_up()
    assert [pause.reply().body for pause in pauses] == [{"status": "paused"}] * 2
    assert slow.send("/is_paused").body == {"is_paused": True}
    assert second.is_waiting
    assert slow.send("/resume", b"").status == 200
    assert second.reply().body["choices"][0]["text"] == expected


@pytest.mark.parametrize("was_paused", [False, True])
def test_a_client_that_leaves_gives_up_its_pause(slow: Running, was_paused: bool) -> None:
    first = long_request(slow)
    if was_paused:
        assert slow.send("/pause?mode=keep", b"").status == 200
    client = Client(slow, "/pause?mode=wait")
    wait_until(lambda: is_awaited(slow), 20)
    second = Call(slow, COMPLETE, SHORT)
    wait_until(lambda: metric(slow, "vllm:num_requests_waiting") == 1, 20)
    client.hang_up()
    wait_until(lambda: is_awaited(slow, 0), 20)
    assert slow.send("/is_paused").body == {"is_paused": was_paused}
    if was_paused:
        assert second.is_waiting
        assert slow.send("/resume", b"").status == 200
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
def test_another_call_ends_the_wait(slow: Running, path: str, status: int, message: str) -> None:
    first = long_request(slow)
    pause = Call(slow, "/pause?mode=wait")
    wait_until(lambda: is_awaited(slow), 20)
    assert slow.send(path, b"").status == 200
    reply = pause.reply()
    assert (reply.status, message in str(reply.body)) == (status, True)
    assert slow.send("/is_paused").body == {"is_paused": status == 200}
    if "abort" in path:
        assert '"abort"' in first.answer()
    first.hang_up()
    slow.send("/resume", b"")
    assert slow.send(COMPLETE, SHORT).status == 200


def test_the_server_goes_on_before_it_sleeps(slow: Running) -> None:
    """Requests that come are refused; a pause that waits as well keeps its own."""
    first = long_request(slow)
    pause = Call(slow, "/pause?mode=wait")
    wait_until(lambda: is_awaited(slow), 20)
    kept = Call(slow, COMPLETE, SHORT)
    wait_until(lambda: metric(slow, "vllm:num_requests_waiting") == 1, 20)
    sleep = Call(slow, "/sleep?level=1&mode=wait")
    wait_until(lambda: is_awaited(slow, 2), 20)
    refused = slow.send(COMPLETE, SHORT)
    assert (refused.status, "about to sleep" in refused.error["message"]) == (503, True)
    first.hang_up()
    assert (pause.reply().status, sleep.reply().status) == (200, 200)
    assert slow.send("/is_sleeping").body == {"is_sleeping": True}
    assert slow.send("/wake_up", b"").status == 200
    assert kept.is_waiting
    assert slow.send("/resume", b"").status == 200
    assert kept.reply().status == 200


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_requests_that_come_in_a_pause_are_refused_or_kept(slow: Running, mode: str) -> None:
    """As in vLLM 0.33; before, they waited without an answer."""
    assert slow.send(f"/pause?mode={mode}", b"").status == 200
    for _ in range(2):
        refused = slow.send(COMPLETE, SHORT)
        assert (refused.status, "POST /resume" in refused.error["message"]) == (503, True)
        assert slow.send("/ready").status == 503
    assert slow.send("/pause?mode=keep", b"").status == 200
    kept = Call(slow, COMPLETE, SHORT)
    wait_until(lambda: metric(slow, "vllm:num_requests_waiting") == 1, 20)
    assert slow.send("/ready").status == 200
    assert slow.send("/resume", b"").status == 200
    assert kept.reply().status == 200


# Sleep and profiles


def sleep_states(server: Running) -> set[str]:
    """Return the states that the metric vllm:engine_sleep_state says the engine is in."""
    lines = re.findall(r"vllm:engine_sleep_state\{(.*)\} 1\.0", str(server.send("/metrics").body))
    return {found for line in lines for found in re.findall(r'sleep_state="(\w+)"', line)}


def test_the_engine_sleeps_and_wakes_up(async_llm: AsyncLLM) -> None:
    with running(async_llm, enable_sleep_mode=True) as server:
        text = server.send(COMPLETE, SHORT).body["choices"][0]["text"]
        assert server.send("/sleep?level=3", b"").error["param"] == "level"
        assert server.send("/sleep?mode=never", b"").status == 400
        reply = server.send("/sleep?mode=wait", b"")
        assert reply.body == {"status": "sleeping", "level": 1}
        assert server.send("/is_sleeping").body == {"is_sleeping": True}
        refused = server.send(COMPLETE, SHORT)
        assert (refused.status, "POST /wake_up" in refused.error["message"]) == (503, True)
        assert server.send("/ready").status == 503
        assert sleep_states(server) == {"weights_offloaded"}
        assert server.send("/wake_up?tags=pool", b"").error["param"] == "tags"
        weights = server.send("/wake_up?tags=weights", b"").body
        assert weights == {"status": "sleeping", "tags": ["weights"]}
        reply = server.send("/wake_up", b"", Origin="http://localhost:8000")
        assert (reply.status, reply.error["param"]) == (403, None)
        assert server.send("/wake_up", b"").body == {"status": "awake", "tags": None}
        assert server.send("/is_sleeping").body == {"is_sleeping": False}
        assert server.send("/ready").status == 200
        assert sleep_states(server) == {"awake"}
        assert server.send(COMPLETE, SHORT).body["choices"][0]["text"] == text


def test_a_model_with_several_names(async_llm: AsyncLLM) -> None:
    with running(async_llm, served_model_name="mine,gpt-4") as server:
        cards = server.send("/v1/models").body["data"]
        assert [card["id"] for card in cards] == ["mine", "gpt-4"]
        assert server.send("/v1/models/gpt-4").body["id"] == "gpt-4"
        for sent, name in ((None, "mine"), ("mine", "mine"), ("gpt-4", "gpt-4")):
            assert server.send(COMPLETE, {**SHORT, "model": sent}).body["model"] == name
        error = server.send(COMPLETE, {**SHORT, "model": "gpt-5"}).error
        assert "this server has 'mine', 'gpt-4'" in error["message"]


def test_a_profile_of_a_server(tmp_path: Path) -> None:
    llm = AsyncLLM(demo_model.MODEL, max_model_len=64, profile_dir=str(tmp_path))
    with running(llm) as server:
        refused = server.send("/stop_profile", {})
        assert refused.status == 400
        assert "start_profile" in refused.error["message"]
        for path in ("/start_profile", "/stop_profile"):  # any page may send that to this machine
            assert server.send(path, b"", Origin="http://evil.example").status == 403
        assert server.send("/start_profile", method="POST").status == 200
        assert server.send("/start_profile", {}).status == 400
        assert server.send(COMPLETE, SHORT).status == 200
        reply = server.send("/stop_profile", method="POST")
        assert reply.status == 200
        assert sorted(reply.body["files"]) == sorted(map(str, tmp_path.iterdir()))
        assert len(reply.body["files"]) == 2
    llm.shutdown()
