"""Quantisation methods: weights in FP8, or in 8 or 4 bits.

A method is made from a loaded weight and replaces it. Knows no checkpoint, no layer and no rank.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from nanovllm.errors import ConfigError
from nanovllm.kernels.cpu import ops as cpu_ops
from nanovllm.kernels.cpu.kernels import CKernels
from nanovllm.kernels.torch_kernels import Kernels, WeightMethod

GROUP_SIZES = {"int8": (128, 64, 32), "int4": (32,)}
"""Allowed numbers of inputs that share a scale, preferred first."""

FP8 = torch.float8_e4m3fn

_ROWS_AT_ONCE = 1024
"""Rows quantised at once. Bounds the size of the float32 copies."""
_FP8_MAX = torch.finfo(FP8).max
_FLOAT16_MAX = torch.finfo(torch.float16).max
_FP8_MATMUL = (8, 9)
"""Minimum compute capability of GPUs with FP8 tensor cores."""


class IntTensor(NamedTuple):
    """A weight [n, k] of 8 or 4 bits: scale * value, where `group` inputs share a scale."""

    values: torch.Tensor
    """[n, k] int8; within [-8, 7] for 4 bits."""
    scales: torch.Tensor
    """[n, k / group] float16."""
    minimums: torch.Tensor | None
    """[n, k / group] float16, or None. With them, which takes 4 bits and groups of 32, a weight is
    scale * (value + 8) + minimum."""
    bits: int


def make_quant_method(
    weight: torch.Tensor, quantization: str | None, kernels: Kernels, *, is_embedding: bool = False
) -> WeightMethod | None:
    """Return the method for `weight` [n, k], or None if plain torch is best with the weight as is.

    Args:
        quantization: "int8", "int4", "fp8", or None to keep all bits of the weight.
        is_embedding: whether the weight is also used as an embedding.

    Raises:
        ConfigError: no group size of `quantization` divides k.
    """
    if quantization == "fp8":
        values, scales = quantize_fp8(weight)
        return Fp8Weight(values, scales, weight.shape[1], weight.dtype, kernels)
    if quantization is not None:
        bits = int(quantization.removeprefix("int"))
        rounded = quantize(weight, bits, choose_group_size(quantization, weight.shape[1]))
        return make_int_method(rounded, weight.dtype, kernels)
    return kernels.pack(weight, is_embedding=is_embedding)


def make_int_method(weight: IntTensor, dtype: torch.dtype, kernels: Kernels) -> WeightMethod:
    """Return the method for a weight of 8 or 4 bits.

    Args:
        dtype: of inputs and results.
    """
    if isinstance(kernels, CKernels):
        return NativeIntWeight(weight)
    return IntWeight(weight, dtype)


def choose_group_size(quantization: str, input_size: int) -> int:
    """Return how many inputs share a scale.

    Raises:
        ConfigError: no allowed group size divides `input_size`.
    """
    for size in GROUP_SIZES[quantization]:
        if input_size % size == 0:
            return size
    raise ConfigError(
        f'quantization "{quantization}" needs layers whose inputs are a multiple of '
        f"{GROUP_SIZES[quantization][-1]}, this model (or one rank's part of it) has a layer of "
        f"{input_size}; use another tensor_parallel_size or no quantization"
    )


def quantize(weight: torch.Tensor, bits: int, group_size: int) -> IntTensor:
    """Round weight [n, k] to 8 or 4 bits, with a scale for each `group_size` neighbours in a row.

    The scale maps the largest magnitude of a group to 127 in 8 bits, and to -8 in 4 bits, whose
    range is -8 to 7 (llama.cpp's Q8_0 and Q4_0 do the same). A larger scale than float16 can hold
    becomes its largest number, but a weight that is no number makes its scale infinite or NaN.
    """
    n, k = weight.shape
    values = torch.empty(n, k, dtype=torch.int8, device=weight.device)
    scales = torch.empty(n, k // group_size, dtype=torch.float16, device=weight.device)
    for start in range(0, n, _ROWS_AT_ONCE):
        part = weight[start : start + _ROWS_AT_ONCE].float().view(-1, k // group_size, group_size)
        if bits == 8:
            scale = part.abs().amax(-1) / 127
        else:
            low, high = part.aminmax(dim=-1)
            scale = torch.where(high > -low, high, low) / -8
        scale = scale.clamp(-_FLOAT16_MAX, _FLOAT16_MAX).where(scale.isfinite(), scale).half()
        rounded = (part / scale.float().masked_fill(scale == 0, 1.0)[..., None]).round_()
        limit = 2 ** (bits - 1)
        values[start : start + _ROWS_AT_ONCE] = rounded.clamp_(-limit, limit - 1).flatten(1)
        scales[start : start + _ROWS_AT_ONCE] = scale
    return IntTensor(values, scales, None, bits)


def quantize_fp8(
    x: torch.Tensor, group_size: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round x [n, k] to float8_e4m3fn values [n, k] with float32 scales [n, ceil(k / group_size)].

    The scale maps the largest magnitude of a group to 448, the largest float8_e4m3fn. A group is
    `group_size` neighbours in a row (None: the whole row).
    """
    n, k = x.shape
    group_size = group_size or max(k, 1)
    values = torch.empty_like(x, dtype=FP8)
    scales = x.new_empty(n, -(-k // group_size), dtype=torch.float32)
    for start in range(0, n, _ROWS_AT_ONCE):
        part = F.pad(x[start : start + _ROWS_AT_ONCE].float(), (0, -k % group_size))
        part = part.view(len(part), -1, group_size) if k else part[..., None]
        scale = part.abs().amax(2) / _FP8_MAX
        scale = torch.where(scale > 0, scale, 1.0)
        part = (part / scale[..., None]).clamp_(-_FP8_MAX, _FP8_MAX)
        values[start : start + _ROWS_AT_ONCE] = part.flatten(1)[:, :k]
        scales[start : start + _ROWS_AT_ONCE] = scale
    return values, scales


class NativeIntWeight:
    """A weight of 8 or 4 bits in the layout of the C kernels, for inputs in bfloat16.

    They round the inputs to 16 bits for a weight of 8 bits, and to 8 bits for one of 4.
    """

    def __init__(self, weight: IntTensor) -> None:
        self._packed, self._scales = cpu_ops.pack_int(*weight)
        self._output_size, self._bits = len(weight.values), weight.bits

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        sizes = self._output_size, self._bits
        return cpu_ops.linear_int(x, self._packed, self._scales, *sizes, bias)

    def embedding(self, ids: torch.Tensor) -> torch.Tensor:
        return cpu_ops.gather_int(ids, self._packed, self._scales, self._bits)


class IntWeight:
    """A weight of 8 or 4 bits in plain torch, for any device.

    Each product dequantises the weight first, so this saves memory but no time.
    """

    def __init__(self, weight: IntTensor, dtype: torch.dtype) -> None:
        self._weight, self._dtype = weight, dtype
        if weight.bits == 4:  # two values a byte, the even input in the low half
            packed = weight.values[:, ::2].bitwise_and(15) | weight.values[:, 1::2] << 4
            self._weight = weight._replace(values=packed)

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, self._dequantize(self._weight), bias)

    def embedding(self, ids: torch.Tensor) -> torch.Tensor:
        values, scales, minimums, bits = self._weight
        minimums = None if minimums is None else F.embedding(ids, minimums)
        rows = IntTensor(F.embedding(ids, values), F.embedding(ids, scales), minimums, bits)
        return self._dequantize(rows)

    def _dequantize(self, weight: IntTensor) -> torch.Tensor:
        """Return `weight`, whose values are packed, in the dtype of inputs."""
        values, scales, minimums, bits = weight
        if bits == 4:
            values = torch.stack([values << 4 >> 4, values >> 4], -1).flatten(1)
        grouped = values.view(len(values), scales.shape[1], -1).float()
        if minimums is not None:
            grouped += 8
        grouped *= scales.float()[..., None]
        if minimums is not None:
            grouped += minimums.float()[..., None]
        return grouped.flatten(1).to(self._dtype)


class Fp8Weight:
    """A weight in FP8, with a float32 scale for each group of inputs of each output.

    On a GPU with FP8 tensor cores, inputs are rounded to FP8 in groups of the same size. torch
    multiplies if a group is a whole row, else a Triton kernel does. On other devices, and for
    shapes and dtypes that these do not support, each product dequantises the weight first, which
    saves memory but no time.

    Args:
        values: [n, k] float8_e4m3fn.
        scales: [n, ceil(k / group_size)] float32.
        dtype: of inputs and results.
    """

    def __init__(
        self,
        values: torch.Tensor,
        scales: torch.Tensor,
        group_size: int,
        dtype: torch.dtype,
        kernels: Kernels,
    ) -> None:
        self._values, self._scales = values, scales
        self._group_size, self._dtype = group_size, dtype
        self._counters: torch.Tensor | None = None
        has_fp8 = values.is_cuda and torch.cuda.get_device_capability(values.device) >= _FP8_MATMUL
        self._kernels = kernels.fp8 if has_fp8 else None
        self._rowwise = (  # the requirements of torch._scaled_mm with a scale for each row
            has_fp8
            and dtype == torch.bfloat16
            and scales.shape[1] == 1
            and all(size % 16 == 0 for size in values.shape)
        )
        self._groupwise = (
            self._kernels is not None
            and dtype != torch.float32
            and scales.shape[1] > 1
            and self._kernels.inputs_of_a_step(group_size) > 0
        )

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if not self._rowwise and not self._groupwise:
            return F.linear(x, self._dequantize(self._values, self._scales), bias)
        rowwise = self._rowwise
        y = self.apply_rowwise(x) if rowwise else self.apply_groupwise(x, self._kernels)
        return y if bias is None else y.add_(bias)

    def apply_rowwise(self, x: torch.Tensor) -> torch.Tensor:
        """Round each row of `x` with one scale and multiply with torch."""
        values, scales = (quantize_fp8 if self._kernels is None else self._kernels.quantize)(x)
        return torch._scaled_mm(
            values, self._values.t(), scales, self._scales.t(), out_dtype=self._dtype
        )

    def apply_groupwise(self, x: torch.Tensor, kernels: Any) -> torch.Tensor:
        """Round each group of `x` with one scale and multiply with `kernels` (triton.fp8)."""
        group_size = self._group_size
        values, scales = kernels.quantize(x, group_size)
        if self._counters is None:
            self._counters = kernels.new_counters(self._values)
        weight = self._values, self._scales, group_size, self._dtype
        return kernels.multiply(values, scales, *weight, self._counters)

    def embedding(self, ids: torch.Tensor) -> torch.Tensor:
        return self._dequantize(self._values[ids], self._scales[ids])

    def _dequantize(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        if scales.shape[1] > 1:
            scales = scales.repeat_interleave(self._group_size, 1)[:, : values.shape[1]]
        return (values.float() * scales).to(self._dtype)
