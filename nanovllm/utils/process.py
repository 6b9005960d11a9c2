"""What this process is in, and what a fork of it must not keep. Imports no torch.

While a forked process has a copy of a pipe, nobody at the other end sees that this process is gone;
and it would wait for ever for threads that it does not have.
"""

import contextlib
import ctypes
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

_PAUSE_HARD = 2  # omp.h's omp_pause_hard
_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def call_in_forked(method: Callable[[], None]) -> None:
    """Call `method`, of an object, in each process that is forked while the object lives."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        if (found := reference()) is not None:
            found()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)


def end_openmp_threads() -> None:
    """End the threads that this one's torch computes with, before a fork: both processes make new
    ones. With GNU's OpenMP; others see to it.
    """
    if "torch" not in sys.modules:
        return
    with contextlib.suppress(OSError):  # systems without /proc
        with open("/proc/self/maps", encoding="utf-8") as maps:
            paths = {line.split(maxsplit=5)[5].strip() for line in maps if "/libgomp" in line}
        for path in paths:
            with contextlib.suppress(AttributeError):  # before GCC 9
                ctypes.CDLL(path).omp_pause_resource_all(_PAUSE_HARD)


def control_groups(controller: str) -> list[Path]:
    """Return the directories of the control groups, of version 1 or 2, that this process is in.

    They go from the innermost to the root. A limit of any of them holds. Some may be missing: in a
    container the root is the container's group, and the names of those below it may be the host's.

    Args:
        controller: "memory" or "cpu".
    """
    paths = {_ROOT: "", _ROOT / controller: ""}
    try:
        lines = _OWN.read_text(encoding="utf-8").splitlines()
    except OSError:  # another system
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths[_ROOT] = path
        elif controller in controllers.split(","):
            paths[_ROOT / controller] = path
    found = []
    for root, path in paths.items():
        names = [name for name in path.split("/") if name]
        if ".." in names:  # outside of what this process sees
            names = []
        found += [root.joinpath(*names[:depth]) for depth in range(len(names), -1, -1)]
    return found
