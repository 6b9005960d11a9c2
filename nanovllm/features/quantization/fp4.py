"""Weights in FP4: numbers of 4 bits (E2M1), of which 16 (NVFP4) or 32 (MXFP4) share a scale of 8
bits: linears as compressed-tensors and ModelOpt store them, and experts as gpt-oss does. A linear
in NVFP4 has one more scale. They stay in their bits.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import torch

from nanovllm.errors import CheckpointError, ConfigError, UnsupportedModelError
from nanovllm.features.quantization.integer import FP4_NUMBERS, IntRows, IntTensor, int_tensor
from nanovllm.features.quantization.quantized_fields import (
    Field,
    LoadedField,
    QuantizedNumbers,
    row_ranges,
    unpack_columns,
)
from nanovllm.kernels.torch_kernels import Kernels, LinearMethod
from nanovllm.layers.experts import StackedLinear
from nanovllm.layers.linear import WeightFormat, WeightModule
from nanovllm.loading.shards import Shard
from nanovllm.utils.distributed import tensor_parallel

E8M0_BIAS = 127
_E8M0_NAN = 255
_E2M1 = torch.tensor([sign * number for sign in (1, -1) for number in FP4_NUMBERS])
"""What 4 bits stand for."""


class Fp4Layout(NamedTuple):
    """The tensors that stand in place of a linear's weight [n, k], by the ends of their names."""

    name: str
    """For the log and for errors."""
    pairs: str
    """[n, k / 2] uint8: two numbers a byte, the first in the low half."""
    group_size: int
    """Numbers of a row that share a scale."""
    scale_dtype: torch.dtype
    """Of "weight_scale" [n, k / group_size]: float8_e4m3fn, or uint8 for powers of two (E8M0)."""
    factor: str | None = None
    """A float32 number for the whole linear, which multiplies the weight; None: there is none."""
    divides: bool = False
    """Whether `factor` divides the weight instead."""


NVFP4 = Fp4Layout(
    "NVFP4", "weight_packed", 16, torch.float8_e4m3fn, "weight_global_scale", divides=True
)
MXFP4 = Fp4Layout("MXFP4", "weight_packed", 32, torch.uint8)
MODELOPT_NVFP4 = Fp4Layout("ModelOpt NVFP4", "weight", 16, torch.float8_e4m3fn, "weight_scale_2")


class QuantizedFp4(QuantizedNumbers):
    """Loads the FP4 weights of the checkpoint linears that one matrix merges.

    Raises:
        UnsupportedModelError: the linears' inputs are not whole groups.
    """

    def __init__(self, layout: Fp4Layout, matrix: WeightModule) -> None:
        super().__init__(matrix, layout.name)
        self._layout = layout
        device = self._device
        scale = Field("weight_scale", layout.scale_dtype, layout.group_size)
        factor = Field(layout.factor or "", torch.float32, None, outputs=None, flat=True)
        self._pairs = LoadedField(Field(layout.pairs, torch.uint8, 2), device)
        self._scales = LoadedField(scale, device)
        self._factors = LoadedField(factor, device)
        self._loaded = [self._pairs, self._scales, self._factors]

    def _tensors(self, weight: Shard) -> Iterator[Shard]:
        if weight.shape[1] % (size := self._layout.group_size):
            raise UnsupportedModelError(
                f"{weight.name.removesuffix('.weight')}: {self.label} has scales of {size} inputs, "
                f"which do not divide its {weight.shape[1]} inputs"
            )
        yield self._pairs.shard(weight)
        yield self._scales.shard(weight)
        if self._layout.factor is not None:
            yield self._factors.shard(weight)

    def _kept(self, dtype: torch.dtype, kernels: Kernels) -> tuple[LinearMethod | None, str]:
        factors = self._row_factors()
        if self._is_exact:
            return None, "small linears keep their bits"
        if dtype == torch.float32:
            return None, "the model's dtype is float32"
        rows = IntRows(self._shape[0], dtype, kernels)
        for start, stop in row_ranges(0, *self._shape):
            part = None if factors is None else factors[start:stop]
            pairs = self._pairs.rows(start, stop)
            scales = self._scales.rows(start, stop)
            rows.store(start, unpack_fp4(pairs, scales, part))
        return rows.method(), "kept in 4 bits"

    def _wide(self, dtype: torch.dtype) -> torch.Tensor:
        factors = self._row_factors()
        wide = torch.empty(self._shape, dtype=dtype, device=self._device)
        for start, stop in row_ranges(0, *self._shape):
            scales = _float_scales(self._scales.rows(start, stop))
            if factors is not None:
                scales *= factors[start:stop, None]
            values = unpack_columns(self._pairs.rows(start, stop), 4).int() + 8
            numbers = _E2M1.to(self._device)[values]
            grouped = numbers.view(*scales.shape, self._layout.group_size) * scales[..., None]
            wide[start:stop] = grouped.flatten(1)
        return wide

    def _row_factors(self) -> torch.Tensor | None:
        """Return what multiplies each row [n] float32."""
        layout = self._layout
        if layout.factor is None:
            return None
        for name, factor, *_ in self._factors.parts:
            if not (factor.isfinite() & (factor > 0)).all():
                raise CheckpointError(
                    f"{name} is {factor.item()}, must be a positive number: the file is damaged"
                )
        factors = self._factors.rows(0, self._shape[0])[:, 0]
        return 1 / factors if layout.divides else factors


def unpack_fp4(
    pairs: torch.Tensor, scales: torch.Tensor, factors: torch.Tensor | None = None
) -> IntTensor:
    """Return a weight in FP4: the same numbers, bit for bit.

    Args:
        pairs: [n, k / 2] uint8, the first number of a pair in the low half.
        scales: [n, k / group] float8_e4m3fn, or uint8 for powers of two (E8M0).
        factors: [n] float32, further factors of the rows.
    """
    values = unpack_columns(pairs, 4)
    weight = int_tensor(values, _float_scales(scales), 4, factors=factors, fp4=True)
    assert weight is not None, "the scales of an IntTensor hold E4M3 and E8M0"
    return weight


def _float_scales(scales: torch.Tensor) -> torch.Tensor:
    return powers_of_two(scales) if scales.dtype == torch.uint8 else scales.float()


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Return 2 ** (e - 127) for E8M0 numbers e (uint8), in float32."""
    ones = torch.ones(exponents.shape, device=exponents.device)
    powers = torch.ldexp(ones, exponents.int() - E8M0_BIAS)
    return powers.masked_fill(exponents == _E8M0_NAN, torch.nan)


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
    """Loads a matrix of experts and its scales."""

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
