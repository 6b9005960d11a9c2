"""Finds the memory of weights on a CPU and releases it while keeping its addresses: whoever holds a
pointer, such as a recorded step, continues once the memory has values again. A file keeps them.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nanovllm.errors import ConfigError
from nanovllm.kernels.cpu.packed import OneDnnWeight
from nanovllm.kernels.torch_kernels import Kernels
from nanovllm.layers.linear import WeightModule, base_method
from nanovllm.utils.memory import return_pages

_MIN_BYTES = 2**16
"""Smaller tensors, such as norms, stay where they are."""


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that a weight's method holds, in an order that depends on its class alone.

    Tensors in oneDNN's layout have no address: `OneDnnWeight` is left out.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()))
    elif not isinstance(value, OneDnnWeight | Kernels | nn.Module | type) and type(
        value
    ).__module__.startswith("nanovllm."):
        yield from tensors_of(getattr(value, "__dict__", {}))


class HeldWeights:
    """The memory of the weights of some models.

    Attributes:
        tensors: whole memories, as bytes, in a fixed order.
        opaque: weights in oneDNN's layout.
    """

    def __init__(self, models: list[nn.Module]) -> None:
        found: dict[int, torch.UntypedStorage] = {}
        opaque: dict[int, OneDnnWeight] = {}
        for model in models:
            for module in model.modules():
                values: list[Any] = [p.data for p in module.parameters(recurse=False)]
                method = base_method(module) if isinstance(module, WeightModule) else None
                if isinstance(method, OneDnnWeight):
                    opaque[id(method)] = method
                values.append(method)
                for tensor in tensors_of(values):
                    if not tensor.is_meta:
                        storage = tensor.untyped_storage()
                        found.setdefault(storage.data_ptr(), storage)
        self.tensors = [torch.empty(0, dtype=torch.uint8).set_(each) for each in found.values()]
        self.opaque = list(opaque.values())

    def give_back(self) -> None:
        """Give the memory to the system. What is in it is lost, except in small tensors."""
        for tensor in self.tensors:
            if tensor.nbytes >= _MIN_BYTES:
                return_pages(tensor)
        for weight in self.opaque:
            weight.release()


class Spool:
    """A file without a name, which ends with the process however that ends.

    It stays between two sleeps: if the weights have not changed, the second writes nothing.
    """

    def __init__(self) -> None:
        self._file: Any = None  # as tempfile makes it

    def save(self, weights: HeldWeights) -> None:
        """Write the weights, unless the file has them.

        Raises:
            ConfigError: the file cannot be written; the weights are as they were.
        """
        if self._file is not None:
            return
        directory = _spool_directory()
        try:
            with contextlib.ExitStack() as closing:
                file = closing.enter_context(tempfile.TemporaryFile(dir=directory))
                for memory in weights.tensors:
                    file.write(_bytes_of(memory))
                for weight in weights.opaque:
                    file.write(_bytes_of(weight.dense()))
                file.flush()
                closing.pop_all()
        except OSError as error:
            raise ConfigError(
                f"sleep(level=1) keeps the weights in a file in {Path(directory)}, which cannot be "
                f"written ({error}); set TMPDIR to a directory with room, or use level=2"
            ) from error
        self._file = file

    def load(self, weights: HeldWeights) -> None:
        """Fill the weights again, if the file has them; else make room for values that will be
        written. The file stays.
        """
        if self._file is None:
            for weight in weights.opaque:
                weight.replace(torch.zeros(weight.shape, dtype=weight.dtype))
            return
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
        if self._file.readinto(_bytes_of(memory)) < memory.nbytes:
            raise OSError("the file of the weights ends too early")


def _spool_directory() -> str:
    """Return TMPDIR, or /var/tmp, which is on a disk where /tmp may be memory."""
    chosen = os.environ.get("TMPDIR")
    if chosen is None and os.access("/var/tmp", os.W_OK):
        return "/var/tmp"
    return chosen or tempfile.gettempdir()


def _bytes_of(memory: torch.Tensor) -> Any:
    """Return the bytes of contiguous `memory`, without a copy."""
    return memory.view(torch.uint8).numpy()
