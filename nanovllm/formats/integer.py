"""Weights of 8 or 4 bits: integers, of which a few neighbours share a scale. Knows no layer."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanovllm.errors import ConfigError
from nanovllm.kernels.cpu import ops as cpu_ops
from nanovllm.kernels.cpu.kernels import CKernels
from nanovllm.kernels.cpu.packed import Panels, PanelWeight
from nanovllm.kernels.torch_kernels import Kernels, WeightMethod

GROUP_SIZES = {"int8": (128, 64, 32), "int4": (32,)}
"""Allowed numbers of inputs that share a scale, preferred first."""

_ROWS_AT_ONCE = 1024
"""Rows quantised at once. Bounds the size of the float32 copies."""
_FLOAT16_MAX = torch.finfo(torch.float16).max


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


def make_int_method(weight: IntTensor, dtype: torch.dtype, kernels: Kernels) -> WeightMethod:
    """Return the method for a weight of 8 or 4 bits.

    Args:
        dtype: of inputs and results.
    """
    if isinstance(kernels, CKernels):
        panels = Panels(*cpu_ops.pack_int(*weight), weight.bits)
        return PanelWeight(panels, len(weight.values))
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
