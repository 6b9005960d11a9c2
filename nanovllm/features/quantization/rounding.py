"""Weights that are rounded while they are loaded, because the user asks for it."""

import sys
from collections.abc import Iterator

import torch

from nanovllm.errors import ConfigError
from nanovllm.features.quantization.fp8 import FP8, Fp8Weight, quantize_fp8
from nanovllm.features.quantization.integer import BITS, IntRows, choose_group_size
from nanovllm.features.quantization.quantized_fields import NUMBERS_AT_ONCE, PanelRows, first_row
from nanovllm.kernels.torch_kernels import Kernels, LinearMethod
from nanovllm.layers.experts import Router, StackedLinear
from nanovllm.layers.linear import LinearBase, WeightFormat, WeightModule
from nanovllm.layers.pieces import HeadLinear, SmallLinear
from nanovllm.loading.shards import Shard
from nanovllm.utils.pages import PageReserve

EXACT = (Router, SmallLinear, HeadLinear)
"""Matrices that are not rounded: small, and a rounded logit may choose another expert, or close a
gate."""


class Rounding(WeightFormat):
    """All weights in "int8", "w8a8" or "int4", or those of linears in "fp8".

    Args:
        reserve: gives integers for the C kernels their memory while it lasts.
    """

    def __init__(
        self, quantization: str, kernels: Kernels, reserve: PageReserve | None = None
    ) -> None:
        self.name = quantization
        self._kernels = kernels
        self._reserve = reserve

    def quantized(self, matrix: WeightModule, names: list[str]) -> "RoundedWeight | None":
        assert matrix.weight is not None
        is_fp8 = self.name == "fp8"  # which is for linears: embedding and head stay as they are
        if isinstance(matrix, EXACT) or (is_fp8 and not isinstance(matrix, LinearBase)):
            return None
        if isinstance(matrix, StackedLinear) and self._kernels.name == "triton":
            raise ConfigError(
                f"quantization {self.name!r} is not for experts on a GPU; leave it out"
            )
        return RoundedWeight(self.name, matrix.weight, self._kernels, self._reserve)


class RoundedWeight:
    """Loads plain numbers, and rounds them as they come, a few rows at a time."""

    def __init__(
        self,
        quantization: str,
        like: torch.Tensor,
        kernels: Kernels,
        reserve: PageReserve | None = None,
    ) -> None:
        self.label = quantization
        self.description = f"rounded to {quantization}"
        self._like = like
        self._rows = rounded_rows(quantization, like, kernels, reserve)
        self._coming = PanelRows(len(like), self._rows.store, self._rows.at_once)

    def shards(self, weight: Shard) -> Iterator[Shard]:
        self._coming.expect(first_row(weight))
        yield weight

    def store(self, target: torch.Tensor, values: torch.Tensor) -> None:
        first = target.storage_offset() // self._like.shape[1]
        self._coming.add(first, values.to(self._like.device, self._like.dtype).contiguous())

    def method(self, dtype: torch.dtype, kernels: Kernels) -> LinearMethod:
        self._coming.finish()
        return self._rows.method()


def rounded_rows(
    quantization: str, like: torch.Tensor, kernels: Kernels, reserve: PageReserve | None = None
) -> "_RowsInIntegers | _RowsInFp8":
    """Return what rounds the rows of a weight of `like`'s shape, dtype and device.

    Args:
        reserve: see `Rounding`.

    Raises:
        ConfigError: no group size of `quantization` divides the inputs.
    """
    if quantization == "fp8":
        return _RowsInFp8(like, kernels)
    return _RowsInIntegers(quantization, like, kernels, reserve)


class _RowsInIntegers:
    def __init__(
        self,
        quantization: str,
        like: torch.Tensor,
        kernels: Kernels,
        reserve: PageReserve | None,
    ) -> None:
        self._bits = BITS[quantization]
        self._short_inputs = quantization == "w8a8"
        self._group = choose_group_size(quantization, like.shape[1])
        self._rows = IntRows(len(like), like.dtype, kernels, reserve)
        self.at_once = sys.maxsize if self._rows.rounds_in_c else NUMBERS_AT_ONCE

    def store(self, start: int, values: torch.Tensor) -> None:
        self._rows.store_rounded(
            start, values, self._bits, self._group, short_inputs=self._short_inputs
        )

    def method(self) -> LinearMethod:
        return self._rows.method()


class _RowsInFp8:
    def __init__(self, like: torch.Tensor, kernels: Kernels) -> None:
        self._like = like
        self._kernels = kernels
        self.at_once = NUMBERS_AT_ONCE
        self._values = torch.empty(0)
        self._scales = torch.empty(0)

    def store(self, start: int, values: torch.Tensor) -> None:
        if not len(self._values):
            n, k = self._like.shape
            self._values = torch.zeros(n, k, dtype=FP8, device=self._like.device)
            self._scales = torch.ones(n, 1, device=self._like.device)
        rows = slice(start, start + len(values))
        self._values[rows], self._scales[rows] = quantize_fp8(values)

    def method(self) -> LinearMethod:
        width = self._like.shape[1]
        dtype = self._like.dtype
        return Fp8Weight(self._values, self._scales, width, dtype, self._kernels)
