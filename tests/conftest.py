"""Shared fixtures. Imports no torch at module level: the scheduler's tests run without it."""

import ctypes
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny: threads would only wait
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def has_cuda() -> bool:
    """Whether this process can use a GPU; without torch, which would take seconds to import."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
    except OSError:
        return False


if not has_cuda():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: it decides there and then
if importlib.util.find_spec("triton") is None:  # there are no wheels for this system
    collect_ignore_glob = ["kernels/triton/*"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Skip a test of more ranks than this machine has GPUs; without any, ranks run on the CPU."""
    try:
        return (yield)
    except Exception as error:
        if "GPUs, torch finds" in str(error):
            pytest.skip(str(error))
        raise


@pytest.fixture(scope="session")
def shared_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return a random checkpoint with the given config; made once, so tests only read it."""

    @functools.cache
    def make(**config: Any) -> str:
        from tests.checkpoints import make_checkpoint

        return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), **config)

    return make


@pytest.fixture(scope="session")
def random_model(shared_checkpoint: Callable[..., str]) -> str:
    """A random float32 Qwen3 checkpoint without a tokenizer: odd vocabulary, 2 KV heads."""
    return shared_checkpoint()


@pytest.fixture
def make_llm() -> Iterator[Any]:
    """`LLM`, shut down when the test ends."""
    from nanovllm import LLM

    made = []

    def make(model: str | Path, **options: Any) -> LLM:
        made.append(LLM(str(model), **options))
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()
