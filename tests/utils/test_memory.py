"""Lazy allocation of large tensors, and returning or keeping freed memory."""

import platform
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from nanovllm.utils.memory import _populate, lazy_zeros, populate, return_freed

MIB = 2**20
linux = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not glibc")


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * 4096


@pytest.mark.parametrize("shape", [(3, 5), (8, MIB)])
def test_zeros(shape: tuple[int, ...]) -> None:
    zeros = lazy_zeros(shape, torch.int8)
    assert zeros.shape == shape
    assert not zeros.any()
    zeros[-1, -1] = 7
    assert zeros.sum() == 7


@linux
def test_pages_are_taken_when_they_are_written() -> None:
    before = resident()
    zeros = lazy_zeros((128, MIB), torch.int8)
    assert resident() - before < 16 * MIB
    zeros[:64] = 1
    assert resident() - before > 50 * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="needs MADV_POPULATE_WRITE")
def test_pages_are_taken_in_the_background() -> None:
    zeros = lazy_zeros((64, MIB), torch.int8)
    zeros[9] = 1
    before, deadline = resident(), time.monotonic() + 30
    populate(zeros, zeros[16:48])
    while resident() - before < 28 * MIB:
        assert time.monotonic() < deadline
        time.sleep(0.01)  # the thread gives way to others
    assert zeros.sum(dtype=torch.int64) == MIB


@pytest.mark.skipif(sys.platform != "linux", reason="needs MADV_POPULATE_WRITE")
@pytest.mark.parametrize("is_gone", [True, False])
def test_pages_are_taken_while_the_tensor_lives(is_gone: bool) -> None:
    zeros = lazy_zeros((128, MIB), torch.int8)
    args = (None, [None] * is_gone, zeros.data_ptr(), zeros.nbytes)
    before = resident()
    thread = threading.Thread(target=_populate, args=args)  # it lowers its own priority
    thread.start()
    thread.join()
    assert (resident() - before > 64 * MIB) == (not is_gone)


@linux
@glibc
def test_freed_memory_goes_back() -> None:
    pieces = [bytes([i % 255 + 1]) * 100_000 for i in range(2000)]
    last = pieces.pop()  # above the others, so that the heap cannot shrink by itself
    pieces.clear()
    before = resident()
    return_freed()
    assert before - resident() > 100 * MIB
    assert len(last) == 100_000


@glibc
def test_freed_memory_is_kept_for_the_next_tensor_and_a_process_ends() -> None:
    """In a new process, because malloc's settings cannot be undone. It ends while pages are taken.

    Symptom: "terminate called without an active exception": the last reference to the memory was
    the thread's. It waited in munmap() when the interpreter ended, and a thread that then asks for
    the GIL ends amid the destructors of a tensor.
    """
    script = """
import resource, torch
from nanovllm.utils.memory import keep_freed, lazy_zeros, populate

def faults_of_a_tensor():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(64 * 2**20, dtype=torch.int8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults_of_a_tensor()
given_back = faults_of_a_tensor()
keep_freed()
for _ in range(32):  # the block just freed may not fit an aligned one, until neighbours merge
    kept = faults_of_a_tensor()
    if kept < given_back / 4:
        break
print(given_back, kept, flush=True)
zeros = lazy_zeros((128, 2**20), torch.int8).fill_(1)
populate(zeros, zeros)
del zeros
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    given_back, kept = map(int, done.stdout.split())
    assert given_back >= 32  # 64 MiB in huge pages; 16384 in pages of 4 KiB
    assert kept < given_back / 4
