"""The numbers of the page /status, the log, and the metrics."""

import time
from typing import Any

import pytest

from nanovllm import AsyncLLM, __version__
from tests.glossary import QUESTION
from tests.server.conftest import Running, running

CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": QUESTION}],
    "temperature": 0,
    "max_tokens": 160,
}
COMPLETIONS: dict[str, Any] = {"prompt": [QUESTION, "Hello"], "max_tokens": 3}


def test_numbers_are_those_of_the_requests(server: Running) -> None:
    before = server.send("/status.json").body
    usage = server.send("/v1/chat/completions", CHAT).body["usage"]
    after = server.send("/status.json").body
    assert after["model"] == server.state.model_name
    assert after["version"] == __version__
    assert after["uptime"] > before["uptime"] > 0
    assert after["output_tokens"] - before["output_tokens"] == usage["completion_tokens"]
    assert after["prompt_tokens"] - before["prompt_tokens"] == usage["prompt_tokens"]
    assert after["requests"]["stop"] - before["requests"]["stop"] == 1
    assert after["first_tokens"]["count"] == before["first_tokens"]["count"] + 1
    assert after["running"] == after["waiting"] == after["kv_cache_usage"] == 0
    assert after["kv_cache_tokens"] == 2048 * server.state.llm.engine.worker_info.block_size
    assert after["mean_acceptance_length"] is None, "there is no speculation"


def test_a_request_in_the_log(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    """With what the engine did for it, and nothing of what it said."""
    with caplog.at_level("INFO", "nanovllm.apps.server"):
        answer = server.send("/v1/chat/completions", CHAT, X_Request_Id="my-id")
        other = server.send("/v1/completions", COMPLETIONS)
        stream = server.send("/v1/chat/completions", {**CHAT, "stream": True})
        deadline = time.monotonic() + 5  # the line of a stream comes after its last byte
        while len(caplog.records) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert answer.headers["x-request-id"] == "my-id"
    assert stream.status == 200
    first, second, third = (vars(record)["request"] for record in caplog.records)
    usage = answer.body["usage"]
    assert first["id"] == "my-id"
    assert first["path"] == "/v1/chat/completions"
    used = (usage, other.body["usage"], usage)
    for fields, usage in zip((first, second, third), used, strict=True):
        assert fields["status"] == 200
        assert fields["prompt_tokens"] == usage["prompt_tokens"]
        assert fields["output_tokens"] == usage["completion_tokens"]
        assert 0 < fields["ttft"] < fields["duration"]
    assert (first["finish"], second["finish"], third["finish"]) == ("stop", "length", "stop")
    assert QUESTION not in caplog.text
    assert "paged attention" not in caplog.text.lower()


@pytest.mark.of_engines
def test_metrics_of_the_server(async_llm: AsyncLLM) -> None:
    """The queue holds one sequence, so two answers are too many."""
    with running(async_llm, max_waiting=1) as server:
        assert server.send("/v1/completions", {**COMPLETIONS, "n": 2}).status == 400
        assert server.send("/v1/completions", {"max_tokens": -1, "prompt": "x"}).status == 400
        assert server.send("/v1/chat/completions", CHAT).status == 200
        assert server.send("/nowhere").status == 404
        time.sleep(0.3)  # for the event loop to be watched
        answer = server.send("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    name = server.state.model_name

    def value(sample: str, **labels: str) -> float:
        words = ",".join(f'{k}="{v}"' for k, v in sorted({"model_name": name, **labels}.items()))
        (line,) = (x for x in answer.body.splitlines() if x.startswith(f"{sample}{{{words}}} "))
        return float(line.split()[-1])

    assert value("vllm:num_requests_running", engine="0") == 0
    assert value("vllm:request_success_total", engine="0", finished_reason="stop") == 1
    assert value("vllm:request_success_total", engine="0", finished_reason="abort") == 0
    assert value("nanovllm:refused_requests_total", reason="too_many_sequences") == 1
    count = "nanovllm:http_requests_total"
    assert value(count, path="/v1/completions", status="400") == 2
    assert value(count, path="/v1/chat/completions", status="200") == 1
    assert value(count, path="other", status="404") == 1
    assert value("nanovllm:event_loop_lag_seconds_count", engine="0") > 0
