"""Weights in FP8: rounding to it, and products with it."""

from typing import Any

import torch
import torch.nn.functional as F

from nanovllm.kernels.torch_kernels import Kernels

FP8 = torch.float8_e4m3fn

_ROWS_AT_ONCE = 1024
"""Rows quantised at once. Bounds the size of the float32 copies."""
_FP8_MAX = torch.finfo(FP8).max
_FP8_MATMUL = (8, 9)
"""Minimum compute capability of GPUs with FP8 tensor cores."""


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


class Fp8Weight:
    """A weight in FP8, with a float32 scale for each group of inputs of each output.

    On a GPU with FP8 tensor cores, inputs are rounded to FP8 in groups of the same size. torch
    multiplies if a group is a whole row, otherwise a Triton kernel. On other devices, and for
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
        self._values = values
        self._scales = scales
        self._group_size = group_size
        self._dtype = dtype
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
            self._counters = kernels.new_counters(len(self._values), self._values.device)
        weight = self._values, self._scales, group_size, self._dtype
        return kernels.multiply(values, scales, *weight, self._counters)

    def embedding(self, ids: torch.Tensor) -> torch.Tensor:
        return self._dequantize(self._values[ids], self._scales[ids])

    def _dequantize(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        if scales.shape[1] > 1:
            scales = scales.repeat_interleave(self._group_size, 1)[:, : values.shape[1]]
        return (values.float() * scales).to(self._dtype)
