"""Large tensors that take no memory before they are written, and memory that is given back."""

import platform
from pathlib import Path

import pytest
import torch

from nanovllm.utils.memory import lazy_zeros, return_freed

MIB = 2**20
linux = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("shape", [(3, 5), (64, MIB)])
def test_zeros(shape: tuple[int, ...]) -> None:
    zeros = lazy_zeros(shape, torch.int8)
    assert zeros.shape == shape
    assert not zeros.any()
    zeros[-1, -1] = 7
    assert zeros.sum() == 7


@linux
def test_pages_are_taken_when_they_are_written() -> None:
    before = resident()
    zeros = lazy_zeros((256, MIB), torch.int8)
    assert resident() - before < 32 * MIB
    zeros[:128] = 1
    assert resident() - before > 100 * MIB


@linux
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not glibc")
def test_freed_memory_goes_back() -> None:
    pieces = [bytes([i % 255 + 1]) * 100_000 for i in range(2000)]
    last = pieces.pop()  # lies above the others, so that the heap cannot shrink
    pieces.clear()
    before = resident()
    return_freed()
    assert before - resident() > 100 * MIB
    assert len(last) == 100_000
