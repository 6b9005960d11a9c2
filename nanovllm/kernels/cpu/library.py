"""Holds the compiled C kernels of this process and calls them.

Without usable kernels, `library()` returns None and the layers use torch. Knows no kernel in
particular.
"""

import ctypes
import functools
import logging
import threading
from typing import Protocol

import torch

from nanovllm.kernels.cpu.build import Unavailable, load

logger = logging.getLogger(__name__)

Argument = torch.Tensor | int | float | None
"""An argument of a kernel. C gets a tensor as its address and None as a null pointer."""


class Recorder(Protocol):
    """Stores kernel calls, which then do not run."""

    def add(self, name: str, args: tuple[Argument, ...]) -> None:
        """Store a call of kernel `name`."""
        ...


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the C kernels, or None if they cannot be used; a warning in the log says why.

    The first call loads them, and compiles them if no earlier process has.
    """
    try:
        kernels = load()
    except Unavailable as reason:
        logger.warning("native CPU kernels are off, torch serves, slower: %s", reason)
        return None
    logger.info("native CPU kernels are on")
    return kernels


def supports(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether there are C kernels for tensors of this device and dtype."""
    return dtype == torch.bfloat16 and device.type == "cpu" and library() is not None


def call(name: str, *args: Argument) -> None:
    """Run kernel `name`. If this thread has a recorder, store the call there instead."""
    if _thread.recorder is not None:
        _thread.recorder.add(name, args)
        return
    kernels = library()
    assert kernels is not None
    function = getattr(kernels, name)
    function(*[arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args])


def record_calls(recorder: Recorder | None) -> None:
    """Store this thread's next calls in `recorder`; with None, run them again."""
    _thread.recorder = recorder


class _Thread(threading.local):
    recorder: Recorder | None = None


_thread = _Thread()
