"""Finds the memory of weights and gives it to the system, so that its addresses stay: whoever holds
a pointer, such as a recorded step, goes on when the memory has values again.

Knows no name of a weight. For CPUs.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from nanovllm.kernels.cpu.packed import OneDnnWeight
from nanovllm.kernels.torch_kernels import Kernels
from nanovllm.layers.linear import Matrix
from nanovllm.layers.matrices import own_method
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
        tensors: in a fixed order, each memory once.
        opaque: weights in oneDNN's layout.
    """

    def __init__(self, models: list[nn.Module]) -> None:
        found: dict[int, torch.Tensor] = {}
        opaque: dict[int, OneDnnWeight] = {}
        for model in models:
            for module in model.modules():
                values: list[Any] = [p.data for p in module.parameters(recurse=False)]
                method = own_method(module) if isinstance(module, Matrix) else None
                if isinstance(method, OneDnnWeight):
                    opaque[id(method)] = method
                values.append(method)
                for tensor in tensors_of(values):
                    if not tensor.is_meta:
                        found.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        self.tensors = [whole_memory(tensor) for tensor in found.values()]
        self.opaque = list(opaque.values())

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def give_back(self) -> None:
        """Give the memory to the system. What is in it is lost, except in small tensors."""
        for tensor in self.tensors:
            if tensor.nbytes >= _MIN_BYTES:
                return_pages(tensor)
        for weight in self.opaque:
            weight.release()

    def take(self) -> None:
        """Make room for values that will be written: zeros until then."""
        for weight in self.opaque:
            weight.replace(torch.zeros(weight.shape, dtype=weight.dtype))


def whole_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the storage of `tensor`, which may be a view: uint8."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
