"""Holds the compiled C kernels of this process and calls them.

Without usable kernels, `library()` returns None and the layers use torch.
"""

import contextlib
import ctypes
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from nanovllm.errors import OutOfMemoryError
from nanovllm.kernels.cpu.build import Unavailable, load
from nanovllm.kernels.cpu.calls import CALL_BYTES, pack_call

logger = logging.getLogger(__name__)

Argument = torch.Tensor | int | float | None
"""An argument of a kernel. C gets a tensor as its address and None as a null pointer."""


Recorder = Callable[[str, list[int | float]], None]
"""Stores a call of a kernel, by its name and arguments, in place of running it. Tensors among the
arguments are addresses."""


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


def library_name() -> str | None:
    """Return the file name of the C kernels, which says of what and how they were compiled."""
    kernels = library()
    return None if kernels is None else Path(kernels._name).name


def description() -> str | None:
    """Return the instructions with which the C kernels multiply bfloat16, and their file's name."""
    kernels = library()
    if kernels is None:
        return None
    return f"{kernels.nv_instructions().decode()}, {library_name()}"


def call(name: str, *args: Argument) -> None:
    """Run kernel `name`. If this thread has a recorder, store the call there instead."""
    addresses = [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg or 0 for arg in args]
    if _thread.recorder is not None:
        _thread.recorder(name, addresses)
    else:
        run(pack_call(name, addresses))


def run(calls: bytes, num_tokens: int = -1, num_rows: int = -1) -> None:
    """Run calls written by `pack_call`, on as many threads as torch uses.

    Args:
        num_tokens, num_rows: replace the numbers of tokens and of rows in the calls, if given.

    Raises:
        OutOfMemoryError: the system refuses a kernel's scratch memory. The outputs of the calls
            are then undefined; later calls work.
    """
    kernels = library()
    assert kernels is not None
    num_calls = len(calls) // CALL_BYTES
    threads = _thread.num_threads or torch.get_num_threads()
    refused = kernels.nv_run(calls, num_calls, num_tokens, num_rows, threads)
    if refused:
        raise OutOfMemoryError(
            f"the system refuses {refused} bytes of memory to a CPU kernel; free memory, or lower "
            "max_num_batched_tokens"
        )


def record_calls(recorder: Recorder | None) -> None:
    """Store this thread's next calls in `recorder`; with None, run them again."""
    _thread.recorder = recorder


@contextlib.contextmanager
def torch_on_one_thread() -> Iterator[None]:
    """Run torch's operations of this thread on one CPU thread inside, and kernels on all of them.

    For operations that take microseconds: the threads of OpenMP spin while they wait for each
    other, for a time slice of the system if one of them has lost its core.
    """
    before = torch.get_num_threads()
    outer = _thread.num_threads
    _thread.num_threads = outer or before
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _thread.num_threads = outer


class _Thread(threading.local):
    recorder: Recorder | None = None
    num_threads: int | None = None  # CPU threads of a kernel; None: as many as torch uses


_thread = _Thread()
