"""Host memory for large tensors: lazy allocation, huge pages and malloc settings.

Knows nothing of the contents.
"""

import contextlib
import ctypes
import math
import mmap

import torch

_LARGE = 2 * 2**20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros on the CPU. The system allocates a page when it is first written.

    Large tensors use huge pages if the system grants them: a step reads all weights once, and the
    address translation of 4 KiB pages costs up to a third of its time.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < _LARGE or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def return_freed() -> None:
    """Return freed memory to the system. glibc otherwise keeps free memory below a block in use."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def keep_freed() -> None:
    """Let malloc keep up to a GiB of freed memory from now on, to reuse it.

    glibc otherwise returns a step's large tensors to the system, sometimes after every layer. The
    system then zeroes new pages: 175,000 page faults and 5% of the time for 4096 tokens of
    Qwen3-0.6B.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 2**30)
        mallopt(_M_TRIM_THRESHOLD, 2**30)
