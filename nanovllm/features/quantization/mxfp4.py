"""Experts in MXFP4, as gpt-oss stores them: 32 numbers of 4 bits (E2M1) share a power of two.

They stay in their bits.
"""

import dataclasses
from collections.abc import Iterator

import torch

from nanovllm.errors import ConfigError, UnsupportedModelError
from nanovllm.features.quantization.fp4 import E8M0_BIAS, unpack_fp4
from nanovllm.features.quantization.integer import IntRows
from nanovllm.features.quantization.quantized_fields import row_ranges
from nanovllm.kernels.torch_kernels import Kernels, LinearMethod
from nanovllm.layers.experts import StackedLinear
from nanovllm.layers.linear import WeightFormat, WeightModule
from nanovllm.loading.shards import Shard
from nanovllm.utils.distributed import tensor_parallel

_BLOCK = 32
_BLOCK_BYTES = 16


class Mxfp4Format(WeightFormat):
    """A checkpoint whose experts are in MXFP4. All else is plain numbers."""

    name = "MXFP4"

    def quantized(self, matrix: WeightModule, names: list[str]) -> "QuantizedMxfp4 | None":
        if not isinstance(matrix, StackedLinear):
            return None
        assert matrix.weight is not None
        inputs = matrix.weight.shape[1]
        if inputs % _BLOCK:
            raise ConfigError(
                f"tensor_parallel_size {tensor_parallel().size} leaves {inputs} inputs of an "
                f"expert to a rank, not whole MXFP4 blocks of {_BLOCK}; use a smaller size"
            )
        return QuantizedMxfp4(matrix.weight)


class QuantizedMxfp4:
    """Loads a matrix of experts and its scales.

    Args:
        like: has the shape of the weight, and is on its device.
    """

    label = "MXFP4"
    description = "in MXFP4, kept in 4 bits"

    def __init__(self, like: torch.Tensor) -> None:
        self._rows, self._inputs = like.shape
        self._device = like.device
        self._pairs: torch.Tensor | None = None
        self._scales = torch.empty(0)

    def shards(self, weight: Shard) -> Iterator[Shard]:
        """Yield the blocks and the scales of a part of an expert's weight, [E, outputs, bytes]."""
        if weight.index is None:
            raise UnsupportedModelError(f"{weight.name}: experts in MXFP4 must be in one tensor")
        if self._pairs is None:
            rows = self._rows
            inputs = self._inputs
            pairs = torch.empty(rows, inputs // 2, dtype=torch.uint8, device=self._device)
            self._pairs = pairs
            self._scales = pairs.new_full((rows, inputs // _BLOCK), E8M0_BIAS)
        first = weight.target.storage_offset() // self._inputs
        part_rows = slice(first, first + len(weight.target))
        outputs, inputs = weight.part_shape
        shape = weight.shape[0], outputs, inputs // _BLOCK
        start = weight.start // _BLOCK if weight.dim else weight.start
        part = dataclasses.replace(weight, start=start, transposed=False)
        blocks = self._pairs[part_rows].view(len(weight.target), -1, _BLOCK_BYTES)
        yield dataclasses.replace(
            part, name=f"{weight.name}_blocks", shape=(*shape, _BLOCK_BYTES), target=blocks
        )
        scales = self._scales[part_rows]
        yield dataclasses.replace(part, name=f"{weight.name}_scales", shape=shape, target=scales)

    def method(self, dtype: torch.dtype, kernels: Kernels) -> LinearMethod:
        assert self._pairs is not None
        pairs = self._pairs
        scales = self._scales
        self._pairs = None
        if kernels.name == "triton":
            raise ConfigError("experts in MXFP4 run on CPUs alone; choose device='cpu'")
        weight = IntRows(self._rows, dtype, kernels)
        for start, stop in row_ranges(0, self._rows, self._inputs):
            weight.store(start, unpack_fp4(pairs[start:stop], scales[start:stop]))
        return weight.method()
