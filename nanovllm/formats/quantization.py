"""Quantisation methods: weights packed for the C kernels or oneDNN, in FP8, or in 8 or 4 bits.

A method is made from a loaded weight and replaces it. Knows no checkpoint, no layer and no rank.
"""

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from nanovllm.errors import ConfigError
from nanovllm.kernels.cpu import ops as cpu_ops
from nanovllm.kernels.cpu.build import PANEL
from nanovllm.kernels.cpu.library import supports
from nanovllm.kernels.selector import triton_kernels
from nanovllm.utils.pages import PageReserve

GROUP_SIZES = {"int8": (128, 64, 32), "int4": (32,)}
"""Allowed numbers of inputs that share a scale, preferred first."""

FP8 = torch.float8_e4m3fn

_ROWS_AT_ONCE = 1024
"""Rows quantised at once. Bounds the size of the float32 copies."""
_ONEDNN_HINT_ROWS = 16
"""Number of input rows that oneDNN optimises its layout for. Inputs may have any number of rows."""
_ONEDNN_MIN_ELEMENTS = 2**20
"""Minimum elements of a weight to amortise oneDNN's 50 us call overhead."""
_FP8_MAX = torch.finfo(FP8).max
_FLOAT16_MAX = torch.finfo(torch.float16).max
_FP8_MATMUL = (8, 9)
"""Minimum compute capability of GPUs with FP8 tensor cores."""


class QuantizeMethod(Protocol):
    """A weight [n, k] in its own format, with the operations that read it."""

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x [T, k] times the transpose of the weight, plus `bias` [n] if given: [T, n]."""
        ...

    def embedding(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows `ids` [T] int64 of the weight: [T, k]."""
        ...


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
    weight: torch.Tensor, quantization: str | None, *, native: bool, is_embedding: bool = False
) -> QuantizeMethod | None:
    """Return the method for `weight` [n, k], or None if plain torch is best with the weight as is.

    Args:
        quantization: "int8", "int4", "fp8", or None to keep all bits of the weight.
        native: whether nanovllm's own kernels or oneDNN's packed layout may be used.
        is_embedding: whether the weight is also used as an embedding.

    Raises:
        ConfigError: no group size of `quantization` divides k.
    """
    if quantization == "fp8":
        values, scales = quantize_fp8(weight)
        return Fp8Weight(values, scales, weight.shape[1], weight.dtype, native=native)
    if quantization is not None:
        bits = int(quantization.removeprefix("int"))
        rounded = quantize(weight, bits, choose_group_size(quantization, weight.shape[1]))
        return make_int_method(rounded, weight.dtype, native=native)
    if native and can_pack(weight):
        packed = PackedWeight(*weight.shape)
        packed.store(0, weight)
        return packed
    return OneDnnWeight(weight) if native and not is_embedding and use_onednn(weight) else None


def make_int_method(weight: IntTensor, dtype: torch.dtype, *, native: bool) -> QuantizeMethod:
    """Return the method for a weight of 8 or 4 bits.

    Args:
        dtype: of inputs and results.
        native: whether nanovllm's own kernels may be used.
    """
    if native and supports(weight.values.device, dtype):
        return NativeIntWeight(weight)
    return IntWeight(weight, dtype)


def use_onednn(weight: torch.Tensor) -> bool:
    """Return whether oneDNN supports `weight` here and `weight` is large enough to gain from it."""
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


def can_pack(weight: torch.Tensor) -> bool:
    """Return whether `weight` can become a `PackedWeight`."""
    return supports(weight.device, weight.dtype) and weight.shape[1] % PANEL == 0


class PackedWeight:
    """An unquantised bfloat16 weight [n, k] in the layout of the C kernels, of zeros at first.

    Args:
        reserve: gives the memory while it lasts.
    """

    def __init__(self, n: int, k: int, reserve: PageReserve | None = None) -> None:
        self._packed = cpu_ops.packed_zeros(n, k, reserve)
        self._output_size = n

    def store(self, start: int, rows: torch.Tensor) -> None:
        """Store `rows` [m, k]; the first is row `start`, a multiple of 32.

        m is a multiple of 32, too, unless these are the last rows.
        """
        cpu_ops.pack_rows(rows.to(torch.bfloat16), self._packed, start)

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return cpu_ops.linear(x, self._packed, self._output_size, bias)

    def embedding(self, ids: torch.Tensor) -> torch.Tensor:
        return cpu_ops.gather(ids, self._packed)


class OneDnnWeight:
    """An unquantised weight in oneDNN's layout, for dtypes and shapes without C kernels.

    `embedding` is slow: it unpacks the whole weight.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ONEDNN_HINT_ROWS)

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")

    def embedding(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self._packed.to_dense())


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
        native: whether nanovllm's own kernels may be used.
    """

    def __init__(
        self,
        values: torch.Tensor,
        scales: torch.Tensor,
        group_size: int,
        dtype: torch.dtype,
        *,
        native: bool,
    ) -> None:
        self._values, self._scales = values, scales
        self._group_size, self._dtype = group_size, dtype
        self._counters: torch.Tensor | None = None
        has_fp8 = values.is_cuda and torch.cuda.get_device_capability(values.device) >= _FP8_MATMUL
        self._kernels = triton_kernels("fp8") if has_fp8 and native else None
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
