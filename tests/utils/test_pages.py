"""Pages taken early, of memory and of files: they are zeros, and those not taken go back."""

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm.utils import pages
from nanovllm.utils.memory import lazy_zeros
from nanovllm.utils.pages import PageReserve, read_ahead
from tests.utils.test_memory import MIB, linux, resident


@linux
def test_pages_are_there_before_they_are_taken() -> None:
    before, deadline = resident(), time.monotonic() + 30
    reserve = PageReserve(128 * MIB)
    while resident() - before < 120 * MIB:
        assert time.monotonic() < deadline
        time.sleep(0.01)
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
        time.sleep(0.01)


@pytest.mark.parametrize("statement", ["del reserve", "reserve.take(5)", "pass"])
def test_process_ends_while_pages_are_taken(statement: str) -> None:
    code = f"""
from nanovllm.utils.pages import PageReserve
reserve = PageReserve(256 * {MIB})
{statement}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="asks Linux")
@pytest.mark.parametrize("memory_pieces", [100, 6])
def test_files_are_read_ahead_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory_pieces: int
) -> None:
    """Up to half of the memory."""
    piece = 2 * MIB
    asked = []

    def note(descriptor: int, start: int, length: int, advice: int) -> None:
        assert (length, advice) == (piece, os.POSIX_FADV_WILLNEED)
        asked.append((Path(f"/proc/self/fd/{descriptor}").readlink().name, start // piece))

    sizes: Any = {"SC_PHYS_PAGES": memory_pieces * piece // 4096, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(pages.os, "posix_fadvise", note)
    monkeypatch.setattr(pages.os, "sysconf", sizes.__getitem__)
    files = [tmp_path / name for name in ("a", "missing", "b")]
    for file in (files[0], files[2]):
        with file.open("wb") as opened:
            opened.truncate(2 * piece + 1)
    read_ahead(files)
    for thread in threading.enumerate():
        if thread.name == "read-ahead":
            thread.join()
    whole = [(name, start) for name in "ab" for start in range(3)]
    assert asked == (whole if memory_pieces == 100 else whole[:4])
