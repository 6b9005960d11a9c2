"""How a linear layer keeps its weight: packed for the C kernels, in FP8, or in 8 or 4 bits.

A method is made from a loaded weight and replaces it. Knows no checkpoint, no layer and no rank.
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F

from nanovllm.errors import ConfigError
from nanovllm.kernels.cpu import ops as cpu_ops
from nanovllm.kernels.cpu.library import serves
from nanovllm.kernels.selector import triton_kernels

GROUP_SIZES = {"int8": (128, 64, 32), "int4": (32,)}
"""Inputs that share a scale, by quantization: the first that divides a layer's inputs."""

FP8 = torch.float8_e4m3fn

_ROWS_AT_ONCE = 1024
"""Rows quantised at once, which bounds the float32 copies."""
_ONEDNN_HINT_ROWS = 16
"""Rows of a product that oneDNN lays a weight out for; it multiplies any number."""
_ONEDNN_MIN_ELEMENTS = 2**20
"""Numbers in a weight from which on a call of oneDNN, 50 us of its own, pays."""
_FP8_MAX = torch.finfo(FP8).max
_FP8_MATMUL = (8, 9)
"""Compute capability of the GPUs that multiply FP8."""


class QuantizeMethod(Protocol):
    """A weight [n, k] in a form of its own."""

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [T, k] times the transpose of the weight: [T, n]."""
        ...

    def embedding(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the weight's `rows` [T] int64: [T, k]."""
        ...


def make_quant_method(
    weight: torch.Tensor, quantization: str | None, *, native: bool, is_embedding: bool = False
) -> QuantizeMethod | None:
    """Return the method that keeps `weight` [n, k], or None where it had better stay as it is.

    Args:
        native: whether kernels of our own, or oneDNN's in their place, may be used.
        is_embedding: whether rows of it will be asked for.

    Raises:
        ConfigError: no group size of `quantization` divides k.
    """
    if quantization == "fp8":
        values, scales = quantize_fp8(weight)
        return Fp8Weight(values, scales, weight.shape[1], weight.dtype, native=native)
    usable = native and serves(weight.device, weight.dtype)
    if quantization is not None:
        bits = int(quantization.removeprefix("int"))
        values, scales = quantize(weight, bits, choose_group_size(quantization, weight.shape[1]))
        make = NativeIntWeight if usable else IntWeight
        return make(values, scales, bits, weight.dtype)
    if usable and weight.shape[1] % 32 == 0:
        return PackedWeight(weight)
    return OneDnnWeight(weight) if native and not is_embedding and use_onednn(weight) else None


def use_onednn(weight: torch.Tensor) -> bool:
    """Return whether it pays that oneDNN keeps this weight, and multiplies its dtype here."""
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if weight.device.type != "cpu" or not available or weight.numel() < _ONEDNN_MIN_ELEMENTS:
        return False
    if weight.dtype == torch.float32:
        return True
    onednn = torch.ops.mkldnn
    is_bfloat16 = weight.dtype == torch.bfloat16
    return onednn._is_mkldnn_bf16_supported() if is_bfloat16 else onednn._is_mkldnn_fp16_supported()


def choose_group_size(quantization: str, input_size: int) -> int:
    """Return how many inputs share a scale.

    Raises:
        ConfigError: none of the sizes divides `input_size`.
    """
    for size in GROUP_SIZES[quantization]:
        if input_size % size == 0:
            return size
    raise ConfigError(
        f'quantization "{quantization}" needs layers whose inputs are a multiple of '
        f"{GROUP_SIZES[quantization][-1]}, this model (or one rank's part of it) has one of "
        f"{input_size}"
    )


def quantize(weight: torch.Tensor, bits: int, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Round weight [n, k] to int8 [n, k] times bfloat16 scales [n, k / group].

    The scale takes a group's largest value to the end of the range, to -8 in 4 bits, which has no
    8 (llama.cpp's Q4_0 and Q8_0 choose likewise).
    """
    n, k = weight.shape
    values = torch.empty(n, k, dtype=torch.int8, device=weight.device)
    scales = torch.empty(n, k // group_size, dtype=torch.bfloat16, device=weight.device)
    for start in range(0, n, _ROWS_AT_ONCE):
        part = weight[start : start + _ROWS_AT_ONCE].float().view(-1, k // group_size, group_size)
        if bits == 8:
            scale = part.abs().amax(-1) / 127
        else:
            low, high = part.aminmax(dim=-1)
            scale = torch.where(high > -low, high, low) / -8
        scale = scale.bfloat16()
        rounded = (part / scale.float().masked_fill(scale == 0, 1.0)[..., None]).round_()
        limit = 2 ** (bits - 1)
        values[start : start + _ROWS_AT_ONCE] = rounded.clamp_(-limit, limit - 1).flatten(1)
        scales[start : start + _ROWS_AT_ONCE] = scale
    return values, scales


def quantize_fp8(
    x: torch.Tensor, group_size: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round x [n, k] to float8_e4m3fn [n, k] times float32 scales [n, ceil(k / group_size)].

    A scale takes the largest number of `group` neighbours in a row (None: of all) to 448.
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


class PackedWeight:
    """All bits of a bfloat16 weight, laid out for the C kernels."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._packed = cpu_ops.pack(weight)
        self._num_outputs = len(weight)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return cpu_ops.linear(x, self._packed, self._num_outputs)

    def embedding(self, rows: torch.Tensor) -> torch.Tensor:
        return cpu_ops.gather(rows, self._packed)


class OneDnnWeight:
    """All bits of a weight in oneDNN's layout, where the C kernels cannot serve.

    Asking for rows of it unpacks the whole.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ONEDNN_HINT_ROWS)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, None, "none", [], "")

    def embedding(self, rows: torch.Tensor) -> torch.Tensor:
        return F.embedding(rows, self._packed.to_dense())


class NativeIntWeight:
    """8 or 4 bits a weight, laid out for the C kernels; inputs are rounded to 16 bits."""

    def __init__(
        self, values: torch.Tensor, scales: torch.Tensor, bits: int, dtype: torch.dtype
    ) -> None:
        assert dtype == torch.bfloat16
        self._packed, self._scales = cpu_ops.pack_int(values, scales, bits)
        self._num_outputs, self._bits = len(values), bits

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return cpu_ops.linear_int(x, self._packed, self._scales, self._num_outputs, self._bits)

    def embedding(self, rows: torch.Tensor) -> torch.Tensor:
        return cpu_ops.gather_int(rows, self._packed, self._scales, self._bits)


class IntWeight:
    """8 or 4 bits a weight, in plain torch on any device: saves memory and no time."""

    def __init__(
        self, values: torch.Tensor, scales: torch.Tensor, bits: int, dtype: torch.dtype
    ) -> None:
        self._bits, self._dtype, self._scales = bits, dtype, scales
        self._values = values
        if bits == 4:
            self._values = values[:, ::2].bitwise_and(15) | values[:, 1::2] << 4

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._dequantize(self._values, self._scales))

    def embedding(self, rows: torch.Tensor) -> torch.Tensor:
        return self._dequantize(F.embedding(rows, self._values), F.embedding(rows, self._scales))

    def _dequantize(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        if self._bits == 4:
            values = torch.stack([values << 4 >> 4, values >> 4], -1).flatten(1)
        grouped = values.view(len(values), scales.shape[1], -1)
        return (grouped.float() * scales.float()[..., None]).flatten(1).to(self._dtype)


class Fp8Weight:
    """8 bits a weight, as a floating-point number.

    GPUs that multiply FP8 do so, the inputs rounded to FP8 with scales for as many of them as share
    one of the weight's: by torch where that is a row, else by a kernel of ours. Elsewhere the
    weight is widened for each product, which saves memory and no time.

    Args:
        values: [n, k] float8_e4m3fn.
        scales: [n, ceil(k / block)] float32.
        dtype: of what is multiplied and returned.
        native: whether kernels of our own may be used.
    """

    def __init__(
        self,
        values: torch.Tensor,
        scales: torch.Tensor,
        block: int,
        dtype: torch.dtype,
        *,
        native: bool,
    ) -> None:
        self._values, self._scales, self._block, self._dtype = values, scales, block, dtype
        has_fp8 = values.is_cuda and torch.cuda.get_device_capability(values.device) >= _FP8_MATMUL
        self._kernels = triton_kernels("fp8") if has_fp8 and native else None
        self._rowwise = (  # what torch._scaled_mm takes with a scale for each row
            has_fp8
            and dtype == torch.bfloat16
            and scales.shape[1] == 1
            and all(size % 16 == 0 for size in values.shape)
        )
        self._groupwise = (
            self._kernels is not None
            and dtype != torch.float32
            and scales.shape[1] > 1
            and self._kernels.inputs_of_a_step(block) > 0
        )

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        if self._rowwise:
            return self.apply_rowwise(x)
        if self._groupwise:
            return self.apply_groupwise(x, self._kernels)
        return F.linear(x, self._dequantize(self._values, self._scales))

    def apply_rowwise(self, x: torch.Tensor) -> torch.Tensor:
        """Round `x` with a scale for each row; let torch multiply."""
        values, scales = (quantize_fp8 if self._kernels is None else self._kernels.quantize)(x)
        return torch._scaled_mm(
            values, self._values.t(), scales, self._scales.t(), out_dtype=self._dtype
        )

    def apply_groupwise(self, x: torch.Tensor, kernels: Any) -> torch.Tensor:
        """Round `x` with a scale for each group of inputs; let `kernels` (gpu_fp8) multiply."""
        return kernels.multiply(
            *kernels.quantize(x, self._block), self._values, self._scales, self._block, self._dtype
        )

    def embedding(self, rows: torch.Tensor) -> torch.Tensor:
        return self._dequantize(self._values[rows], self._scales[rows])

    def _dequantize(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        if scales.shape[1] > 1:
            scales = scales.repeat_interleave(self._block, 1)[:, : values.shape[1]]
        return (values.float() * scales).to(self._dtype)
