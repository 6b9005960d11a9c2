"""The compiled C kernels of this process, and how one of them is called.

Without a compiler `library()` is None, a warning says why, and torch serves.
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
"""What a kernel takes: a tensor's address, a number, or a null pointer."""


class Recorder(Protocol):
    """Takes note of kernel calls in place of running them."""

    def add(self, name: str, args: tuple[Argument, ...]) -> None:
        """Note a call."""
        ...


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the kernels, built if need be, or None where they cannot be used."""
    try:
        kernels = load()
    except Unavailable as reason:
        logger.warning("native CPU kernels are off, torch serves, slower: %s", reason)
        return None
    logger.info("native CPU kernels are on")
    return kernels


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are kernels for such tensors."""
    return dtype == torch.bfloat16 and device.type == "cpu" and library() is not None


def call(name: str, *args: Argument) -> None:
    """Run kernel `name`, or hand the call to this thread's recorder."""
    if _thread.recorder is not None:
        _thread.recorder.add(name, args)
        return
    kernels = library()
    assert kernels is not None
    function = getattr(kernels, name)
    function(*[arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args])


def record_calls(recorder: Recorder | None) -> None:
    """Hand this thread's calls to `recorder` from now on; None runs them again."""
    _thread.recorder = recorder


class _Thread(threading.local):
    recorder: Recorder | None = None


_thread = _Thread()
