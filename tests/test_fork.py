"""A forked process cannot use its parent's engine: it gets an error, and both go on."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import environment

FORKS = """
import asyncio
import gc
import multiprocessing
import os
import signal
import sys

from nanovllm import LLM, AsyncLLM, SamplingParams, demo_model
from nanovllm.errors import EngineDeadError

QUESTION = "What is a block table?"
MESSAGES = [{"role": "user", "content": QUESTION}]
GREEDY = SamplingParams(temperature=0, max_tokens=8)
kind = sys.argv[1]

def generate():
    if kind == "async on ranks":
        return asyncio.run(llm.generate(QUESTION, GREEDY)).text
    return llm.generate(QUESTION, GREEDY, use_tqdm=False)[0].text

def refused():
    calls = [generate]
    if kind == "async on ranks":
        calls += [lambda: asyncio.run(llm.check_health()), lambda: asyncio.run(llm.abort("x"))]
        calls += [lambda: llm.render(MESSAGES), lambda: asyncio.run(llm.chat(MESSAGES))]
        calls += [lambda: asyncio.run(llm.wake_up()), lambda: asyncio.run(llm.score("a", "b"))]
    else:
        calls += [lambda: llm.stream(QUESTION), lambda: next(stream), llm.step, llm.is_finished]
        calls += [lambda: llm.engine.step(), lambda: llm.engine.add_request(QUESTION)]
        calls += [lambda: llm.chat(MESSAGES), lambda: llm.render(MESSAGES), llm.sleep, llm.wake_up]
        calls += [lambda: llm.embed(QUESTION), lambda: llm.score("a", "b"), llm.is_sleeping]
        calls += [llm.reset_prefix_cache, llm.get_metrics, llm.start_profile, llm.stop_profile]
        calls += [lambda: llm.update_weights({}), llm.start_weight_update, lambda: llm.abort(0)]
        calls += [llm.finish_weight_update, lambda: llm.add_request(QUESTION)]
    for call in calls:
        try:
            call()
        except EngineDeadError as error:
            assert f"process {os.getppid()}" in str(error) and "spawn" in str(error), error
        else:
            raise AssertionError("not refused")

def child():
    signal.alarm(60)  # a hang fails the test
    refused()
    globals().pop("stream", None)  # closing it must not wait for the parent's threads
    gc.collect()
    llm.shutdown()
    gc.collect()
    if kind == "alone, then new":
        new = LLM(demo_model.MODEL, max_model_len=256, num_threads=2)
        assert new.generate(QUESTION, GREEDY, use_tqdm=False)[0].text == before

def exit_codes():
    pid = os.fork()
    if not pid:
        child()
        del globals()["llm"]
        sys.exit(7)  # runs the exit handlers and the finalizers
    yield os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    yield process.exitcode

def main():
    global llm, stream, before
    if kind.startswith("alone"):
        llm = LLM(demo_model.MODEL, max_model_len=256, num_threads=2)
    else:
        llm = AsyncLLM(demo_model.MODEL, max_model_len=256, tensor_parallel_size=2)
    before = generate()
    if kind.startswith("alone"):
        stream = llm.stream(QUESTION, GREEDY)
        next(stream)
    print(*exit_codes(), generate() == before, flush=True)

if __name__ == "__main__":  # a spawned rank imports this module again
    main()
"""


SLOW = [pytest.param(k, marks=pytest.mark.long) for k in ("alone, then new", "async on ranks")]


@pytest.mark.parametrize("kind", ["alone", *SLOW])
def test_forked_process_gets_an_error(kind: str, tmp_path: Path) -> None:
    """Symptom: a child that generates hangs for ever, with a new engine, too; one that exits kills
    its parent's ranks.
    """
    script = tmp_path / "forks.py"
    script.write_text(FORKS)
    done = subprocess.run(
        [sys.executable, str(script), kind],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "7 0 True\n", done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 0
