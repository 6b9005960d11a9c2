"""Sleep over HTTP, and a model with several names: what a server of several models builds on."""

import re

import pytest

pytest.importorskip("fastapi")

from nanovllm import AsyncLLM
from tests.server.conftest import Running, running

BODY = {"prompt": "A KV cache is", "max_tokens": 4, "temperature": 0}


def sleep_states(server: Running) -> set[str]:
    """Return the states that the metric vllm:engine_sleep_state says the engine is in."""
    lines = re.findall(r"vllm:engine_sleep_state\{(.*)\} 1\.0", str(server.send("/metrics").body))
    return {found for line in lines for found in re.findall(r'sleep_state="(\w+)"', line)}


def test_the_engine_sleeps_and_wakes_up(async_llm: AsyncLLM) -> None:
    with running(async_llm, enable_sleep_mode=True) as server:
        text = server.send("/v1/completions", BODY).body["choices"][0]["text"]
        assert server.send("/sleep?level=3", b"").error["param"] == "level"
        assert server.send("/sleep?mode=never", b"").status == 400
        reply = server.send("/sleep?mode=wait", b"")
        assert reply.body == {"status": "sleeping", "level": 1}
        assert server.send("/is_sleeping").body == {"is_sleeping": True}
        refused = server.send("/v1/completions", BODY)
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
        assert server.send("/v1/completions", BODY).body["choices"][0]["text"] == text


def test_without_the_option_nothing_sleeps(server: Running) -> None:
    for path in ("/sleep", "/wake_up"):
        reply = server.send(path, b"")
        assert reply.status == 404
        assert "start the server with --enable-sleep-mode" in reply.error["message"]


def test_a_model_with_several_names(async_llm: AsyncLLM) -> None:
    with running(async_llm, served_model_name="mine,gpt-4") as server:
        cards = server.send("/v1/models").body["data"]
        assert [card["id"] for card in cards] == ["mine", "gpt-4"]
        assert server.send("/v1/models/gpt-4").body["id"] == "gpt-4"
        for sent, name in ((None, "mine"), ("mine", "mine"), ("gpt-4", "gpt-4")):
            assert server.send("/v1/completions", {**BODY, "model": sent}).body["model"] == name
        error = server.send("/v1/completions", {**BODY, "model": "gpt-5"}).error
        assert "this server has 'mine', 'gpt-4'" in error["message"]
