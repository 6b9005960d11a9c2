"""Takes pages before they are needed: huge pages of memory, and pages of files. Does not import
torch, because it starts before torch.
"""

import contextlib
import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Iterable
from pathlib import Path

from nanovllm.utils.system import (
    READS_EARLY,
    anonymous_memory,
    physical_memory,
    read_early,
    return_memory,
)

HUGE_PAGE = 2 * 2**20
_SLICE = 8 * HUGE_PAGE
"""Bytes written by one call, which no one can interrupt: about 10 ms."""
_PIECE = 2 * 2**20
"""Bytes of a file asked for at once. Linux reads no more of one request, the rest is ignored."""


class PageReserve:
    """Memory for `size` bytes of weights, whose pages a thread takes from the system at once.

    The system zeroes each new page: 0.66 s for a GiB. While this process imports modules and reads
    headers, another core can do that. The first `take` stops the thread, because whoever takes
    memory writes to it from then on, and on all cores.
    """

    def __init__(self, size: int) -> None:
        memory = self._memory = anonymous_memory(size)
        self._num_taken = 0
        stop = self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_write_zeros, args=(memory, stop), name="page-reserve", daemon=True
        )
        weakref.finalize(self, stop.set)
        self._thread.start()

    def take(self, size: int) -> memoryview | None:
        """Return `size` bytes of zeros that begin on a page; None if fewer are left.

        The memory lives as long as what is made of it.
        """
        self._stop.set()
        self._thread.join()
        start = self._num_taken
        if start + size > len(self._memory):
            return None
        self._num_taken = min(start + -(-size // mmap.PAGESIZE) * mmap.PAGESIZE, len(self._memory))
        return memoryview(self._memory)[start : start + size]

    def close(self) -> None:
        """Give pages that were not taken back to the system."""
        self._stop.set()
        self._thread.join()
        left = len(self._memory) - self._num_taken
        if left >= mmap.PAGESIZE:
            return_memory(self._memory, self._num_taken, left)


def _write_zeros(memory: mmap.mmap, stop: threading.Event) -> None:
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for start in range(0, len(memory), _SLICE):
        if stop.is_set():
            return
        ctypes.memset(address + start, 0, min(_SLICE, len(memory) - start))


def read_ahead(files: Iterable[Path]) -> None:
    """Let a thread ask the system for `files`, in order, up to half of the memory.

    The system reads many pieces at the same time: a disk that gives one reader 0.6 GB/s gave 3.
    A file that cannot be read is left to its reader, who reports the error.
    """
    if READS_EARLY:
        arguments = list(files), physical_memory() // 2
        threading.Thread(target=_ask, args=arguments, name="read-ahead", daemon=True).start()


def _ask(files: list[Path], limit: int) -> None:
    for path in files:
        with contextlib.suppress(OSError), path.open("rb") as file:
            size = min(os.fstat(file.fileno()).st_size, limit)
            for start in range(0, size, _PIECE):
                read_early(file.fileno(), start, _PIECE)
            limit -= size
