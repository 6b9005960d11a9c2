"""Pages taken early: they are zeros, they belong to what was made of them, the rest goes back."""

import gc
import subprocess
import sys
import time
import weakref

import pytest
import torch

from nanovllm.utils.memory import lazy_zeros
from nanovllm.utils.pages import PageReserve
from tests.utils.test_memory import MIB, linux, resident


@linux
def test_pages_are_there_before_they_are_taken() -> None:
    before, deadline = resident(), time.monotonic() + 30
    reserve = PageReserve(128 * MIB)
    while resident() - before < 120 * MIB:
        assert time.monotonic() < deadline
    reserve.close()
    assert resident() - before < 32 * MIB


def test_a_reserve_gives_separate_zeros_while_it_lasts() -> None:
    reserve = PageReserve(3 * MIB)
    first = lazy_zeros((MIB + 1,), torch.int8, reserve)
    second = lazy_zeros((MIB,), torch.int8, reserve)
    beyond = lazy_zeros((MIB,), torch.int8, reserve)
    tensors = [first, second, beyond]
    for number, tensor in enumerate(tensors, 1):
        assert not tensor.any()
        tensor.fill_(number)
    reserve.close()
    del reserve
    gc.collect()
    assert [int(tensor.sum()) for tensor in tensors] == [MIB + 1, 2 * MIB, 3 * MIB]
    assert second.data_ptr() % 4096 == 0
    assert second.data_ptr() - first.data_ptr() == MIB + 4096


@linux
def test_a_reserve_that_nobody_needs_ends() -> None:
    """A checkpoint that is refused leaves one behind."""
    before, deadline = resident(), time.monotonic() + 30
    reserve = PageReserve(512 * MIB)
    gone = weakref.ref(reserve)
    del reserve
    assert gone() is None
    while resident() - before > 32 * MIB:
        assert time.monotonic() < deadline


@pytest.mark.parametrize("statement", ["del reserve", "reserve.take(5)", "pass"])
def test_process_ends_while_pages_are_taken(statement: str) -> None:
    code = f"""
from nanovllm.utils.pages import PageReserve
reserve = PageReserve(256 * {MIB})
{statement}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
