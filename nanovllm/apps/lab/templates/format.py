"""A weight format says how weights are stored. This one rounds them to a grid while they load.

Run it in the folder of this file:

    PYTHONPATH=. nanovllm serve MODEL --quantization my_format:MyFormat

An installed package may also give a format for checkpoints that name it in their
quantization_config: docs/plugins.md. The contract is `WeightFormat` and `QuantizedWeight` in
nanovllm/layers/linear.py.
"""

from collections.abc import Iterator
from typing import Any

import torch

from nanovllm.kernels.torch_kernels import Kernels, LinearMethod, PlainWeight
from nanovllm.layers.linear import WeightFormat, WeightModule
from nanovllm.loading.shards import Shard

STEPS = 256
"""Steps of the grid between two neighbouring integers."""


class MyFormat(WeightFormat):
    """Weights of linear layers as multiples of 1 / STEPS. Other matrices stay plain numbers."""

    name = "my format"

    def __init__(self, config: dict[str, Any]) -> None:
        """Read the checkpoint's quantization_config; it is empty if there is none."""
        self._steps = float(config.get("steps", STEPS))

    def quantized(self, matrix: WeightModule, names: list[str]) -> "_Rounded | None":
        """Return how the weight of a matrix is stored; None: as plain numbers.

        `matrix.weight` has the shape, dtype and device, and no memory. `names` are the checkpoint's
        of the linears that the matrix merges.
        """
        assert matrix.weight is not None
        return _Rounded(matrix.weight, self._steps)


class _Rounded:
    """A weight [n, k] while it is loaded."""

    label = "my format"
    description = "rounded to a grid"

    def __init__(self, like: torch.Tensor, steps: float) -> None:
        self._like = like
        self._steps = steps
        self._values: torch.Tensor | None = None

    def shards(self, weight: Shard) -> Iterator[Shard]:
        """Yield the tensors of the checkpoint that are read in place of `weight`: here itself.

        Called several times. A format with other tensors yields those: their names, shapes, and the
        memory that they are read into.
        """
        yield weight

    def store(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Take some rows of the weight. Without this method, `shards` says where all is read to."""
        if self._values is None:
            self._values = torch.empty_like(self._like, memory_format=torch.contiguous_format)
        first = target.storage_offset() // self._like.shape[1]
        rounded = (values.float() * self._steps).round() / self._steps
        self._values[first : first + len(values)] = rounded.to(self._values)

    def method(self, dtype: torch.dtype, kernels: Kernels) -> LinearMethod:
        """Return what multiplies by the weight: here plain torch."""
        assert self._values is not None
        return PlainWeight(self._values)
