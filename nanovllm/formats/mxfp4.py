"""Experts in MXFP4, as gpt-oss stores them: 32 numbers of 4 bits (E2M1) share a power of two.

They stay in their bits: a weight is twice the number, which is an integer, times half the scale.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from nanovllm.checkpoint.shards import Shard
from nanovllm.errors import ConfigError, UnsupportedModelError
from nanovllm.kernels.cpu import ops as cpu_ops
from nanovllm.kernels.cpu.kernels import CKernels
from nanovllm.kernels.cpu.packed import Panels, PanelWeight
from nanovllm.kernels.torch_kernels import Kernels, WeightMethod
from nanovllm.layers.experts import StackedLinear
from nanovllm.layers.linear import Matrix
from nanovllm.utils.distributed import tensor_parallel

_BLOCK, _BLOCK_BYTES = 32, 16
_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the number, by its bits."""
_HALF_SCALE_BIAS = 128
"""A scale s stands for 2 ** (s - 127), half of it for 2 ** (s - 128)."""
_NO_NUMBER = 255


class Mxfp4Format:
    """A checkpoint whose experts are in MXFP4. All else is plain numbers."""

    name = "MXFP4"

    def __init__(self, config: dict[str, Any]) -> None:
        pass  # it has no other settings

    def stored(self, matrix: Matrix, names: list[str]) -> "StoredMxfp4 | None":
        if not isinstance(matrix, StackedLinear):
            return None
        assert matrix.weight is not None
        inputs = matrix.weight.shape[1]
        if inputs % _BLOCK:
            raise ConfigError(
                f"tensor_parallel_size {tensor_parallel().size} leaves {inputs} inputs of an "
                f"expert to a rank, which are no whole MXFP4 blocks of {_BLOCK}; use a smaller size"
            )
        return StoredMxfp4(matrix.weight)


class StoredMxfp4:
    """Loads a matrix of experts and its scales.

    Args:
        like: has the shape of the weight, and is on its device.
    """

    label = "MXFP4"
    description = "in MXFP4, kept in 4 bits"

    def __init__(self, like: torch.Tensor) -> None:
        (self._rows, self._inputs), self._device = like.shape, like.device
        self._pairs: torch.Tensor | None = None
        self._scales = torch.empty(0)

    def shards(self, weight: Shard) -> Iterator[Shard]:
        """Yield the blocks and the scales of a part of an expert's weight, [E, outputs, bytes]."""
        if weight.index is None:
            raise UnsupportedModelError(f"{weight.name}: experts in MXFP4 must be in one tensor")
        if self._pairs is None:
            rows, inputs = self._rows, self._inputs
            pairs = torch.empty(rows, inputs // 2, dtype=torch.uint8, device=self._device)
            self._pairs, self._scales = pairs, pairs.new_full((rows, inputs // _BLOCK), 127)
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

    def method(self, dtype: torch.dtype, kernels: Kernels) -> WeightMethod:
        assert self._pairs is not None
        pairs, scales, self._pairs = self._pairs, self._scales, None
        if isinstance(kernels, CKernels):
            return native_weight(pairs, scales)
        if kernels.name == "triton":
            raise ConfigError("experts in MXFP4 run on CPUs alone; choose device='cpu'")
        return Fp4Weight(pairs, scales, dtype)


def native_weight(pairs: torch.Tensor, scales: torch.Tensor) -> PanelWeight:
    """Return a weight in MXFP4 for the C kernels.

    Args:
        pairs: [n, k / 2] uint8, the even number of a pair in the low half.
        scales: [n, k / 32] uint8.
    """
    values = _numbers(pairs).view(torch.int8) - 8
    half = _half_scales(scales).bfloat16().view(torch.float16)  # the kernels read its bits
    return PanelWeight(Panels(*cpu_ops.pack_int(values, half, None, 4), 4, fp4=True), len(pairs))


class Fp4Weight:
    """A weight in MXFP4 in plain torch; see `native_weight`.

    Args:
        dtype: of inputs and results.
    """

    def __init__(self, pairs: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> None:
        self._pairs, self._scales, self._dtype = pairs, scales, dtype

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, self._wide(self._pairs, self._scales), bias)

    def embedding(self, ids: torch.Tensor) -> torch.Tensor:
        return self._wide(F.embedding(ids, self._pairs), F.embedding(ids, self._scales))

    def _wide(self, pairs: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        table = torch.tensor(_DOUBLED, dtype=torch.float32, device=pairs.device)
        numbers = table[_numbers(pairs).int()].view(len(pairs), -1, _BLOCK)
        return (numbers * _half_scales(scales)[..., None]).flatten(1).to(self._dtype)


def _numbers(pairs: torch.Tensor) -> torch.Tensor:
    """Return the 4 bits of each number of `pairs` [n, k / 2]: [n, k] uint8."""
    return torch.stack([pairs & 15, pairs >> 4], -1).flatten(1)


def _half_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return half of what the bits of `scales` stand for, in float32."""
    half = torch.ldexp(
        torch.ones(scales.shape, device=scales.device), scales.int() - _HALF_SCALE_BIAS
    )
    return half.masked_fill(scales == _NO_NUMBER, torch.nan)
