"""Keeps the bytes of weights in a temporary file while their memory is the system's.

Knows no model.
"""

import contextlib
import ctypes
import os
import tempfile
from pathlib import Path
from typing import IO

import torch

from nanovllm.errors import ConfigError
from nanovllm.training.memory import HeldWeights


def spool_directory() -> str:
    """Return TMPDIR, or /var/tmp, which is on a disk where /tmp may be memory."""
    chosen = os.environ.get("TMPDIR")
    if chosen is None and os.access("/var/tmp", os.W_OK):
        return "/var/tmp"
    return chosen or tempfile.gettempdir()


class Spool:
    """A file without a name, which ends with the process however that ends.

    It stays between two sleeps: if the weights have not changed, the second writes nothing.
    """

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None

    @property
    def has_weights(self) -> bool:
        return self._file is not None

    def save(self, weights: HeldWeights) -> None:
        """Write the weights, unless the file has them.

        Raises:
            ConfigError: the file cannot be written; the weights are as they were.
        """
        if self._file is not None:
            return
        directory = spool_directory()
        file = None
        try:
            file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115
            for memory in weights.tensors:
                file.write(_bytes_of(memory))
            for weight in weights.opaque:
                dense = weight.dense()
                file.write(_bytes_of(dense))
            file.flush()
        except OSError as error:
            if file is not None:
                with contextlib.suppress(OSError):  # it cannot write what it buffers
                    file.close()
            raise ConfigError(
                f"sleep(level=1) keeps the weights in a file in {Path(directory)}, which cannot be "
                f"written ({error}); set TMPDIR to a directory with room, or use level=2"
            ) from error
        self._file = file

    def load(self, weights: HeldWeights) -> None:
        """Fill the weights again. The file stays."""
        assert self._file is not None
        self._file.seek(0)
        for memory in weights.tensors:
            self._fill(memory)
        for weight in weights.opaque:
            dense = torch.empty(weight.shape, dtype=weight.dtype)
            self._fill(dense)
            weight.replace(dense)

    def forget(self) -> None:
        """Remove the file: the weights have changed."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _fill(self, memory: torch.Tensor) -> None:
        assert self._file is not None
        view = memoryview(_bytes_of(memory)).cast("B")
        while len(view):
            count = self._file.readinto(view)  # type: ignore[attr-defined]
            if not count:
                raise OSError("the file of the weights ends too early")
            view = view[count:]


def _bytes_of(memory: torch.Tensor) -> "ctypes.Array[ctypes.c_char]":
    """Return the bytes of contiguous `memory`, without a copy; it must outlive them."""
    return (ctypes.c_char * memory.nbytes).from_address(memory.data_ptr())
