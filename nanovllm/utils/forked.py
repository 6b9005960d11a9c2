"""What a forked process must not keep: while it has a copy of a pipe, nobody at the other end sees
that this process is gone; and it would wait for ever for threads that it has not. Imports no torch.
"""

import contextlib
import ctypes
import os
import sys
import weakref
from collections.abc import Callable

_PAUSE_HARD = 2  # omp.h's omp_pause_hard


def call_in_forked(method: Callable[[], None]) -> None:
    """Call `method`, of an object, in each process that is forked while the object lives."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        if (found := reference()) is not None:
            found()

    os.register_at_fork(after_in_child=call)


def end_openmp_threads() -> None:
    """End the threads that this one's torch computes with, before a fork: both processes make new
    ones. With GNU's OpenMP; others see to it.
    """
    if "torch" not in sys.modules:
        return
    with contextlib.suppress(OSError):  # systems without /proc
        with open("/proc/self/maps") as maps:
            paths = {line.split(maxsplit=5)[5].strip() for line in maps if "/libgomp" in line}
        for path in paths:
            with contextlib.suppress(AttributeError):  # before GCC 9
                ctypes.CDLL(path).omp_pause_resource_all(_PAUSE_HARD)
