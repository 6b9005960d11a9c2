"""Host memory for large tensors: lazy allocation, huge pages and malloc settings."""

import contextlib
import ctypes
import math
import mmap
import sys
import threading
import weakref

import torch

from nanovllm.utils.pages import HUGE_PAGE, PageReserve
from nanovllm.utils.system import anonymous_memory, lower_thread_priority

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
_MADV_POPULATE_WRITE = 23  # from mman-common.h, since Linux 5.14


def lazy_zeros(
    shape: tuple[int, ...], dtype: torch.dtype, reserve: PageReserve | None = None
) -> torch.Tensor:
    """Return zeros on the CPU. The system allocates a page when it is first written.

    Large tensors use huge pages if the system grants them: a step reads all weights once, and the
    address translation of 4 KiB pages costs up to a third of its time.

    Args:
        reserve: has pages already; used while it lasts.
    """
    size = math.prod(shape) * dtype.itemsize
    if size > sys.maxsize:
        raise MemoryError(f"{size} bytes cannot be addressed")
    if reserve is not None and (memory := reserve.take(size)) is not None:
        return torch.frombuffer(memory, dtype=dtype).view(shape)
    if size < HUGE_PAGE:
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(anonymous_memory(size), dtype=dtype).view(shape)


def populate(whole: torch.Tensor, part: torch.Tensor) -> None:
    """Let the system allocate the pages of `part` in a thread that gives way to others.

    Whoever first writes to a huge page waits until it is zeroed, and until the system has found the
    memory: 0.3 to 6 ms on a virtual machine. Systems other than Linux go on allocating then.

    The thread keeps no memory alive, and stops when `whole`, of which `part` is a view, is gone.
    """
    if sys.platform == "linux":
        gone: list[object] = []
        args = (weakref.ref(whole, gone.append), gone, part.data_ptr(), part.nbytes)
        threading.Thread(target=_populate, args=args, name="populate", daemon=True).start()


def _populate(whole: object, gone: list[object], address: int, size: int) -> None:
    """Take the pages of `size` bytes at `address` until there is something in `gone`.

    The thread owns no tensor: if it ran a tensor's destructor while the interpreter ends, the
    process would abort. If the memory is freed during a call, the call fails. If other memory is
    there by then, some of its pages are taken early. Contents never change.

    Args:
        whole: the weak reference that fills `gone`; it must live as long as the thread.
    """
    madvise = ctypes.CDLL(None).madvise
    lower_thread_priority()
    end = address + size
    start = address // HUGE_PAGE * HUGE_PAGE
    for page in range(start, end, HUGE_PAGE):
        if gone:
            return
        first = max(page, address // mmap.PAGESIZE * mmap.PAGESIZE)
        length = ctypes.c_size_t(min(page + HUGE_PAGE, end) - first)
        madvise(ctypes.c_void_p(first), length, _MADV_POPULATE_WRITE)


def return_freed() -> None:
    """Return freed memory to the system. glibc otherwise keeps free memory below a block in use."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library, or system
        ctypes.CDLL(None).malloc_trim(0)


def return_pages(memory: torch.Tensor) -> None:
    """Give the whole pages of `memory`, contiguous and uint8, to the system; zero the rest.

    The addresses stay. The memory must be this process's own, not a file's: all that torch and this
    module allocate is.
    """
    start = memory.data_ptr()
    size = memory.nbytes
    if sys.platform != "linux":  # others may keep the contents
        memory.zero_()
        return
    first = min(-(-start // mmap.PAGESIZE) * mmap.PAGESIZE, start + size)
    last = max(first, (start + size) // mmap.PAGESIZE * mmap.PAGESIZE)
    memory[: first - start].zero_()
    memory[last - start :].zero_()
    if last > first:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        if madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED):
            raise MemoryError(f"madvise failed: errno {ctypes.get_errno()}")


def keep_freed() -> None:
    """Let malloc keep up to a GiB of freed memory from now on, to reuse it.

    glibc otherwise returns a step's large tensors to the system, sometimes after every layer. The
    system then zeroes new pages: 175,000 page faults and 5% of the time for 4096 tokens of
    Qwen3-0.6B.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library, or system
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 2**30)
        mallopt(_M_TRIM_THRESHOLD, 2**30)
