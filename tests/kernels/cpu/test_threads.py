"""The threads of the C kernels: what they compute, and that they wait without a core."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from nanovllm import LLM, SamplingParams, demo_model
from nanovllm.kernels.cpu import build
from tests.kernels.cpu.helpers import native

CSRC = Path(build.__file__).with_name("csrc")


def compiled(directory: Path, *flags: str) -> Path:
    """Return the stress test, compiled with `flags`; skip the test if the compiler lacks them."""
    program = directory / "stress"
    sources = [Path(__file__).with_name("stress_threads.c"), CSRC / "threads.c"]
    command = ["gcc", "-g", "-O1", "-pthread", "-I", CSRC, *flags, *sources, "-o", program]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and flags:
        pytest.skip(f"the compiler has no {flags}: {done.stderr[-200:]}")
    assert done.returncode == 0, done.stderr
    return program


@native
@pytest.mark.parametrize("flags", [(), ("-fsanitize=thread",)], ids=["plain", "sanitizer"])
def test_each_item_is_computed_once_after_the_phase_before(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """Several callers, tasks of 1 to 4 threads, a forked child. The sanitizer finds no race."""
    program = compiled(tmp_path, *flags)
    env = {**os.environ, "TSAN_OPTIONS": "die_after_fork=0"}
    done = subprocess.run([program], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr[:4000]


@native
def test_an_idle_engine_uses_no_cpu() -> None:
    """Symptom: threads that wait for the next step spin."""
    llm = LLM(demo_model.MODEL, device="cpu", num_threads=2)
    llm.generate("What is a token?", SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
    time.sleep(0.2)  # threads of OpenMP, which torch used at the start, spin for milliseconds
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.05
    llm.shutdown()
