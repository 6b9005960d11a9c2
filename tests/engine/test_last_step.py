"""The step behind the last request, which begins to write its prompt, runs however engines end."""

import asyncio
import logging
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from nanovllm import LLM, AsyncLLM, SamplingParams, demo_model
from nanovllm.engine.engine_thread import EngineThread
from nanovllm.engine.reader import Mailbox
from nanovllm.factory import make_engine
from nanovllm.options.config import Config
from tests.glossary import QUESTIONS

PROMPT = " ".join(QUESTIONS[:18])
ONE = SamplingParams(temperature=0, max_tokens=1)


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return {"max_model_len": 256, "kvcache_block_size": 32, "kv_cache_dir": str(tmp_path)}


def wait_for_files(directory: Path) -> None:
    """Wait for a second entry; nobody waits for the thread that writes."""
    end = time.monotonic() + 20
    while len(list(directory.glob("*/rank*/??/*"))) < 2:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_with_a_step_in_flight(options: dict[str, Any], tmp_path: Path) -> None:
    """The first token is a stop token: by then the next step has been launched."""
    engine = make_engine(Config(model=demo_model.MODEL, **options), queue_depth=1)
    thread, make_request = EngineThread(engine, "LLM"), engine.input_processor.make_request

    def run(request: Any) -> Any:
        arriving: SimpleQueue[Any] = SimpleQueue()
        thread.submit(lambda: thread.start_request(Mailbox(arriving.put), request))
        return arriving.get()

    token = run(make_request("Hi", ONE)).token_ids[0]
    params = SamplingParams(
        temperature=0, max_tokens=8, stop_token_ids=[token], logit_bias={token: 99}
    )
    assert run(make_request(PROMPT, params)).outputs[0].finish_reason == "stop"
    assert engine.is_finished()
    thread.stop()
    wait_for_files(tmp_path)


def test_with_an_engine_that_was_shut_down(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Symptom: closing the stream logs an error with a traceback."""
    llm = LLM(demo_model.MODEL, **options)
    stream = llm.stream(PROMPT, SamplingParams(max_tokens=8))
    next(stream)
    llm.shutdown()
    with caplog.at_level(logging.ERROR):
        stream.close()  # type: ignore[attr-defined]
    assert not caplog.records


def test_with_an_engine_that_is_told_to_end(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request's end is delivered, and the thread finds that it shall end before it goes on."""
    llm = AsyncLLM(demo_model.MODEL, **options)
    run_step = llm.engine.run_step

    def step_and_end() -> None:
        run_step()
        llm._thread.inbox.put(None)

    monkeypatch.setattr(llm.engine, "run_step", step_and_end)
    asyncio.run(llm.generate(PROMPT, ONE))
    llm.shutdown()
    wait_for_files(tmp_path)


def test_with_an_output_that_fails(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: what is left to write counts as a request that has no end, and the thread ends."""
    llm = AsyncLLM(demo_model.MODEL, **options)

    def fails(*_: Any) -> Any:
        raise MemoryError("no text just now")

    async def main() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.output_processor, "_make_completion_output", fails)
            with pytest.raises(MemoryError):
                await llm.generate(PROMPT, ONE)
        await llm.check_health()
        assert (await llm.generate(PROMPT, ONE)).token_ids

    asyncio.run(main())
    llm.shutdown()
