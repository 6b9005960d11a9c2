"""Pinned host memory for pages of a KV pool on a GPU, and copies on a separate stream.

**Order.** Steps run on the default stream, all copies between device and host on `_stream`:
- `save` gathers the pages on the default stream, between the previous step and the next one. So the
  next step may overwrite them at once. `_stream` waits for the gather, then copies it to the slots.
  If there are many pages, the default stream gathers more only once the last ones are copied.
- `restore` and `fill` wait on `_stream` for the mark, after the last step that used the pages, and
  come after each earlier `save`, because that is on the same stream. They return when the device is
  done, and only a step launched after that reads the pages.
- `drain` waits for the mark, after the step that wrote the pages. It returns when the file is
  written, and pages are reused after that.
"""

import threading
from collections.abc import Callable, Sequence as Seq
from typing import Any

import torch

from nanovllm.features.tiers.host_pages import Buffers
from nanovllm.utils.memory import lazy_zeros
from nanovllm.worker.kv_pool import KVPool

_GATHERED_BYTES = 64 * 2**20
"""What `save` gathers at once. A long prompt takes the place of gigabytes of cached KV in one step,
and the GPU has no such memory left next to the pool. The next step waits for all but the last."""


class CudaPages:
    """The `PageCopies` of a GPU.

    Raises:
        RuntimeError: the driver does not pin so much memory.
    """

    def __init__(self, pool: KVPool, num_slots: int) -> None:
        self._pool = pool
        self._device = pool.device
        self.page_bytes = pool.page_bytes
        # torch would round pinned memory up to a power of two, so the driver pins ours.
        self._memory = lazy_zeros((num_slots, self.page_bytes), torch.uint8)
        if num_slots:
            address = self._memory.data_ptr()
            size = self._memory.nbytes
            torch.cuda.check_error(_cudart().cudaHostRegister(address, size, 0))
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._staging = threading.local()

    def __del__(self) -> None:
        if hasattr(self, "_stream") and len(self._memory):
            self._stream.synchronize()
            _cudart().cudaHostUnregister(self._memory.data_ptr())

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def save(self, pages: Seq[int], slots: Seq[int]) -> None:
        size = max(1, _GATHERED_BYTES // self.page_bytes)
        for start in range(0, len(pages), size):
            if start:  # the steps' stream may reuse the memory of `gathered` when it is copied
                torch.cuda.current_stream(self._device).wait_stream(self._stream)
            gathered = self._pool.gather(pages[start : start + size])
            self._stream.wait_event(self.mark())
            with torch.cuda.stream(self._stream):
                for row, slot in zip(gathered, slots[start : start + size], strict=True):
                    self._memory[slot].copy_(row, non_blocking=True)
            if start + size >= len(pages):  # nothing waits for the last ones
                gathered.record_stream(self._stream)

    def restore(self, slots: Seq[int], pages: Seq[int], mark: torch.cuda.Event) -> None:
        self._upload([self._memory[slot] for slot in slots], pages, mark)

    def fill(
        self, pages: Seq[int], mark: torch.cuda.Event, read: Callable[[Buffers], bool]
    ) -> bool:
        staged = self._staged(len(pages))
        if not read([memoryview(row.numpy()) for row in staged]):
            return False
        self._upload(list(staged), pages, mark)
        return True

    def drain(
        self, pages: Seq[int], mark: torch.cuda.Event, write: Callable[[Buffers], object]
    ) -> None:
        staged = self._staged(len(pages))
        self._stream.wait_event(mark)
        with torch.cuda.stream(self._stream):
            staged.copy_(self._pool.gather(pages), non_blocking=True)
            self.mark().synchronize()
        write([memoryview(row.numpy()) for row in staged])

    def _upload(self, rows: list[torch.Tensor], pages: Seq[int], mark: torch.cuda.Event) -> None:
        """Copy pinned `rows` to pages, and wait until that is done."""
        self._stream.wait_event(mark)
        with torch.cuda.stream(self._stream):
            device_rows = [row.to(self._device, non_blocking=True) for row in rows]
            self._pool.scatter(pages, torch.stack(device_rows))
            self.mark().synchronize()

    def _staged(self, num_pages: int) -> torch.Tensor:
        """Return this thread's pinned memory for `num_pages` pages."""
        found: torch.Tensor | None = getattr(self._staging, "rows", None)
        if found is None or len(found) < num_pages:
            shape = (num_pages, self.page_bytes)
            found = self._staging.rows = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        return found[:num_pages]


def _cudart() -> Any:
    """Return the functions of CUDA's runtime that torch offers."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
