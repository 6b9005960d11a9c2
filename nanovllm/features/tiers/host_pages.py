"""Host memory for pages of a KV pool on a CPU, and copies between the two and to files.

`PageCopies` is the interface that each device implements.
"""

from collections.abc import Callable, Sequence as Seq
from typing import Any, Protocol

import torch

from nanovllm.kernels.cpu.library import library
from nanovllm.kernels.cpu.ops import copy_pages
from nanovllm.utils.memory import lazy_zeros, populate, return_pages
from nanovllm.worker.kv_pool import KVPool

_BYTES_AHEAD = 32 * 2**20  # bytes of memory kept ready after the last slot in use

Buffers = list[memoryview]  # one a page, [page_bytes] uint8 each


class PageCopies(Protocol):
    """Copies pages between a pool and host memory, which has a slot for each of as many pages.

    The thread that launches steps calls `mark` and `save`, in the order of the steps. Other threads
    call the rest, each waits until its copy is done, and these pages do not change meanwhile.
    """

    page_bytes: int  # of a page, as it lies in a slot and in a file

    def mark(self) -> Any:
        """Return a mark after all steps launched so far."""
        ...

    def save(self, pages: Seq[int], slots: Seq[int]) -> None:
        """Copy pages to slots before the steps that are launched next change the pages."""
        ...

    def restore(self, slots: Seq[int], pages: Seq[int], mark: Any) -> None:
        """Copy slots to pages, after `mark`."""
        ...

    def fill(self, pages: Seq[int], mark: Any, read: Callable[[Buffers], bool]) -> bool:
        """Let `read` fill the pages, after `mark`; return what it returns."""
        ...

    def drain(self, pages: Seq[int], mark: Any, write: Callable[[Buffers], object]) -> None:
        """Give `write` the content of the pages, after `mark`."""
        ...


class HostPages:
    """The `PageCopies` of a CPU: the pool is host memory itself, so files are read straight into
    its pages, which are contiguous, and written straight from them.

    The system gives memory for a slot when it is first written, so low slots come first.
    """

    def __init__(self, pool: KVPool, num_slots: int) -> None:
        self._pool = pool.pages
        self.page_bytes = self._pool.shape[1]
        self._memory = lazy_zeros((num_slots, self.page_bytes), torch.uint8)
        # A thread uses numpy alone: in a thread, torch would start its own team of threads.
        self._pool_rows = self._pool.numpy()
        self._slot_rows = self._memory.numpy()
        self._num_populated = 0  # slots

    def mark(self) -> None:
        """See `PageCopies`. On a CPU a launched step is done."""

    def save(self, pages: Seq[int], slots: Seq[int]) -> None:
        """See `PageCopies`. On all threads, because the step waits."""
        self._populate_beyond(max(slots, default=0))
        if library() is not None:
            copy_pages(self._pool, pages, slots, into=self._memory)
            return
        for page, slot in zip(pages, slots, strict=True):
            self._memory[slot] = self._pool[page]

    def restore(self, slots: Seq[int], pages: Seq[int], mark: None) -> None:
        for slot, page in zip(slots, pages, strict=True):
            self._pool_rows[page] = self._slot_rows[slot]

    def fill(self, pages: Seq[int], mark: None, read: Callable[[Buffers], bool]) -> bool:
        return read([memoryview(self._pool_rows[page]) for page in pages])

    def drain(self, pages: Seq[int], mark: None, write: Callable[[Buffers], object]) -> None:
        write([memoryview(self._pool_rows[page]) for page in pages])

    def give_back(self) -> None:
        """Give the memory of all slots to the system; they are zeros again."""
        if self._memory.nbytes:
            return_pages(self._memory.view(-1))
        self._num_populated = 0

    def _populate_beyond(self, slot: int) -> None:
        """Have memory ready for the slots after `slot`."""
        start = self._num_populated
        num_slots = len(self._memory)
        if start < num_slots and slot + 1 >= start:
            self._num_populated = slot + 1 + -(-_BYTES_AHEAD // self.page_bytes)
            populate(self._memory, self._memory[start : self._num_populated])
