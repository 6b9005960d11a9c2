"""Spawned ranks give the tokens of one process, die together, and leave nothing behind."""

import contextlib
import functools
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from nanovllm import LLM, SamplingParams, demo_model
from nanovllm.errors import (
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    OutOfMemoryError,
)
from tests.helpers import environment, shared_memory, token_ids, wait_until
from tests.training.weights import changed, read_weights

pytestmark = pytest.mark.spawned

LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)

_OTHERS: set[int] = set()
"""Ranks that lived before the test: those of engines that tests share."""


@pytest.fixture(autouse=True)
def others() -> None:
    _OTHERS.update(child.pid for child in workers())


def workers(parent: int | None = None) -> list[psutil.Process]:
    """Return the ranks that the test spawned; not the resource tracker of multiprocessing."""
    found = []
    for child in psutil.Process(parent).children(recursive=True):
        try:
            if child.pid not in _OTHERS and "spawn_main" in " ".join(child.cmdline()):
                found.append(child)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


def generate_forever(llm: Any) -> None:
    while True:
        llm.generate([[1, 2, 3]] * 8, LONG, use_tqdm=False)


@pytest.mark.long
def test_two_engines_share_one_process(
    make_llm: Any, tensor_parallel_llm: Any, random_model: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Symptom: with a fixed port, or a fixed name of shared memory, the second does not start.

    The workers of the second end with it, although nobody shuts it down. What its first rank logs
    is in this process's log, once.
    """
    alone = make_llm(random_model).generate([[1, 2, 3], [4] * 20], SHORT, use_tqdm=False)
    first = tensor_parallel_llm(random_model, 2)
    with caplog.at_level("INFO", "nanovllm"):
        second = LLM(random_model, tensor_parallel_size=2)
    assert [r.processName for r in caplog.records if "KV pool" in r.message] == ["nanovllm-rank0"]
    for _ in range(2):
        for llm in (first, second):
            outputs = llm.generate([[1, 2, 3], [4] * 20], SHORT, use_tqdm=False)
            assert token_ids(outputs) == token_ids(alone)
    pids = {process.pid for process in second.engine.executor.ranks.processes}
    assert pids <= {child.pid for child in workers()}
    del llm, second
    gc.collect()
    wait_until(lambda: not pids & {child.pid for child in workers()}, 10)


def test_tokens_do_not_depend_on_steps_in_flight(
    make_llm: Any, tensor_parallel_llm: Any, random_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks receive a schedule before the results of the last three are back."""
    prompts = [[i + 1] * (3 + i) for i in range(6)]
    alone = make_llm(random_model).generate(prompts, SHORT, use_tqdm=False)
    llm = tensor_parallel_llm(random_model, 2)
    monkeypatch.setattr(llm.engine, "queue_depth", 3)
    outputs = llm.generate(prompts, SHORT, use_tqdm=False)
    assert token_ids(outputs) == token_ids(alone)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
@pytest.mark.parametrize("enforce_eager", [True, False])
def test_cuda_ranks_agree_with_one(make_llm: Any, enforce_eager: bool) -> None:
    prompts = [[i + 1] * (3 + i) for i in range(6)]
    options = {"dtype": "float32", "max_num_seqs": 8, "enforce_eager": enforce_eager}
    tokens = [
        token_ids(llm.generate(prompts, SHORT, use_tqdm=False))
        for llm in (make_llm(demo_model.MODEL, tensor_parallel_size=n, **options) for n in (1, 2))
    ]
    assert tokens[0] == tokens[1]


@pytest.mark.long
def test_killed_worker_raises_and_leaves_nothing(make_llm: Any, random_model: str) -> None:
    """Rank 0; test_async_llm.py and test_serve.py kill rank 1."""
    llm = make_llm(random_model, tensor_parallel_size=2)
    used = shared_memory(llm.engine.executor.ranks.processes)
    victim = llm.engine.executor.ranks.processes[0]
    threading.Timer(0.5, victim.kill).start()
    start = time.monotonic()
    with pytest.raises(EngineDeadError, match="rank0 exited with -9"):
        generate_forever(llm)
    assert time.monotonic() - start < 10.5
    assert not workers()
    if used:
        assert not used & {entry.inode() for entry in os.scandir("/dev/shm")}
    with pytest.raises(EngineDeadError):
        llm.generate([[1]], LONG, use_tqdm=False)
    for _ in range(2):  # may be called twice
        llm.shutdown()


@pytest.mark.long
def test_slow_worker_catches_up(make_llm: Any, tensor_parallel_llm: Any, random_model: str) -> None:
    """While a rank is stopped, schedules wait in its pipe; none is overwritten."""
    prompts = [[i + 1] * 60 for i in range(16)]
    expected = make_llm(random_model).generate(prompts, SHORT, use_tqdm=False)
    llm = tensor_parallel_llm(random_model, 2)
    slow = llm.engine.executor.ranks.processes[1].pid

    def stutter() -> None:
        for _ in range(3):
            os.kill(slow, signal.SIGSTOP)
            time.sleep(0.3)
            os.kill(slow, signal.SIGCONT)
            time.sleep(0.1)

    thread = threading.Thread(target=stutter)
    thread.start()
    outputs = llm.generate(prompts, SHORT, use_tqdm=False)
    thread.join()
    assert token_ids(outputs) == token_ids(expected)


@pytest.mark.long
def test_error_of_a_rank_at_start_is_raised_and_leaves_nothing(
    shared_checkpoint: Callable[..., str], random_model: str
) -> None:
    three_heads = shared_checkpoint(num_attention_heads=3, num_key_value_heads=3)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 2 does not divide"):
        LLM(three_heads, tensor_parallel_size=2)
    with pytest.raises(OutOfMemoryError, match="max_model_len"):
        LLM(random_model, tensor_parallel_size=2, num_kvcache_blocks=2)
    wait_until(lambda: not workers(), 10)


def script(random_model: str) -> str:
    return textwrap.dedent(f"""
        import os
        import signal
        from nanovllm import LLM, SamplingParams

        def main():
            llm = LLM({random_model!r}, tensor_parallel_size=2)
            if not os.fork():  # as a DataLoader does; it has a copy of all pipes
                signal.pause()
            print("ready", flush=True)
            params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
            while True:
                llm.generate([[1, 2, 3]] * 8, params, use_tqdm=False)

        if __name__ == "__main__":
            main()
    """)


@pytest.mark.long
@pytest.mark.parametrize(("number", "to_group"), [(signal.SIGINT, True), (signal.SIGKILL, False)])
def test_ctrl_c_and_death_of_the_parent_end_everything(
    random_model: str, tmp_path: Path, number: signal.Signals, to_group: bool
) -> None:
    """SIGINT goes to the whole process group, as Ctrl-C in a terminal; SIGKILL to the parent, whose
    forked child lives on.
    """
    path = tmp_path / "run.py"
    path.write_text(script(random_model))
    process = subprocess.Popen(
        [sys.executable, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environment(CUDA_VISIBLE_DEVICES=""),
        # A shell starts background jobs with SIGINT ignored.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    ranks = workers(process.pid)
    assert len(ranks) == 2
    others = {*psutil.Process(process.pid).children(recursive=True)} - {*ranks}
    time.sleep(0.3)
    (os.killpg if to_group else os.kill)(process.pid, number)
    assert process.wait(10) != 0
    wait_until(lambda: not any(rank.is_running() for rank in ranks), 10)
    if not to_group:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the forked child
    _, errors = process.communicate(timeout=10)
    wait_until(lambda: not any(other.is_running() for other in others), 10)
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in errors


def test_ranks_sleep_and_get_new_weights(
    tensor_parallel_llm: Callable[[str, int], LLM], random_model: str, make_llm: Any
) -> None:
    """Each rank takes its part; an error that a rank finds ends none of them."""
    llm = tensor_parallel_llm(random_model, 2)
    old = read_weights(random_model)
    new = changed(old, 1)
    fresh = make_llm(random_model, dtype="float32", max_model_len=256)
    fresh.update_weights(new)
    with pytest.raises(InvalidRequestError, match="has no tensor 'x'"):
        llm.update_weights([("x", old["model.norm.weight"])])
    for wrong in (torch.zeros(0), torch.zeros(64, dtype=torch.complex64).conj()):
        with pytest.raises(InvalidRequestError, match=r"model\.norm\.weight has"):
            llm.update_weights(iter([("model.norm.weight", wrong)]))
    with pytest.raises(AttributeError, match="pickle"):
        llm.engine.executor.call_all(lambda runner: None)  # no rank has got a part of it
    llm.sleep(level=2)
    llm.wake_up(["weights"])
    llm.update_weights(iter(new.items()))
    llm.wake_up()
    prompts = [[1, 2, 3] * 10, [4, 5]]
    try:
        found, expected = (each.generate(prompts, SHORT, use_tqdm=False) for each in (llm, fresh))
        assert token_ids(found) == token_ids(expected)
    finally:
        llm.update_weights(old)
    llm.sleep()
    llm.wake_up()
    fresh.update_weights(old)
    found, expected = (each.generate(prompts, SHORT, use_tqdm=False) for each in (llm, fresh))
    assert token_ids(found) == token_ids(expected)


@pytest.mark.long
def test_where_no_process_can_be_started(tmp_path: Path) -> None:
    """A program from standard input, and a daemonic process: an error that says what to do."""
    program = f"""if True:
        import multiprocessing
        from nanovllm import LLM
        from nanovllm.errors import ConfigError

        def make():
            try:
                LLM({demo_model.MODEL!r}, tensor_parallel_size=2, max_model_len=64)
            except ConfigError as error:
                print(error, flush=True)

        make()
        process = multiprocessing.get_context("fork").Process(target=make, daemon=True)
        process.start()
        process.join()
    """
    done = subprocess.run(
        [sys.executable, "-"],
        input=program,
        env=environment(CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    assert "there is no file" in lines[0]
    assert "<stdin>" in lines[0]
    assert 'below `if __name__ == "__main__":`' in lines[0]
    assert "daemonic process" in lines[1]
    assert "daemon=False" in lines[1]


@pytest.mark.long
def test_a_program_without_its_guard(tmp_path: Path) -> None:
    path = tmp_path / "no_guard.py"
    path.write_text(
        f"from nanovllm import LLM\nLLM({demo_model.MODEL!r}, tensor_parallel_size=2)\n"
    )
    done = subprocess.run(
        [sys.executable, str(path)],
        env=environment(CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("nanovllm.errors.EngineDeadError: a worker process died; nanovllm-rank")
    assert "exited with 1 while it imported your program" in last
    assert 'below `if __name__ == "__main__":`' in last
    assert "and that made another LLM" in done.stderr
