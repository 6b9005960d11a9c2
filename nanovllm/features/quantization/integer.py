"""Weights of 8 or 4 bits: integers, of which a few neighbours share a scale."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from nanovllm.errors import ConfigError
from nanovllm.kernels.cpu.kernels import CKernels
from nanovllm.kernels.cpu.packed import FP4, MINIMUMS, PLAIN, W8A8, ZEROS, IntPanelWeight
from nanovllm.kernels.torch_kernels import Kernels, LinearMethod
from nanovllm.utils.pages import PageReserve

GROUP_SIZES = {"int8": (128, 64, 32), "w8a8": (128, 64, 32), "int4": (32,)}
"""Allowed numbers of inputs that share a scale, preferred first."""
BITS = {"int8": 8, "w8a8": 8, "int4": 4}
"""Of a weight."""

_FLOAT16_MAX = torch.finfo(torch.float16).max


class IntTensor(NamedTuple):
    """A weight [n, k] of 8 or 4 bits, of which `group` neighbours in a row share a scale.

    A weight is factor * scale * (value - zero). Which of the other fields may stand together:
    `minimums` with none of them; `zeros` and `fp4` not with each other.
    """

    values: torch.Tensor
    """[n, k] int8; for 4 bits within [-8, 7]; with fp4 the 4 bits of a number minus 8."""
    scales: torch.Tensor
    """[n, k / group] float16; with fp4 bfloat16. group is a multiple of 32, with fp4 of 16."""
    minimums: torch.Tensor | None
    """[n, k / group] float16, or None. With them, which takes 4 bits and groups of 32, a weight is
    scale * (value + 8) + minimum."""
    bits: int
    zeros: torch.Tensor | None = None
    """[n, k / group] int8, the value that stands for 0; None: 0. At most 119 for 4 bits."""
    factors: torch.Tensor | None = None
    """[n] float32; None: 1."""
    inputs: torch.Tensor | None = None
    """[k] int32, a permutation: column j of `values` belongs to input inputs[j]. None: to j."""
    fp4: bool = False
    """Whether 4 bits stand for a number of E2M1, see FP4_NUMBERS: a weight is
    factor * scale * number."""
    short_inputs: bool = False
    """Whether the C kernels round inputs to 8 bits, not 16: of weights of 8 bits without zeros."""

    def by_rows(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "IntTensor":
        """Return the weight with `change` of each tensor that has a row for each of its rows."""
        changed: Any = {name: change(rows) for name, rows in self.row_tensors().items()}
        return self._replace(**changed)

    def row_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that have a row for each of the weight's, by field."""
        names = ("values", "scales", "minimums", "zeros", "factors")
        return {name: rows for name in names if (rows := getattr(self, name)) is not None}


FP4_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the lower three bits of an E2M1 number stand for. The fourth is its sign."""


def int_tensor(
    values: torch.Tensor,
    scales: torch.Tensor,
    bits: int,
    *,
    zeros: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
    inputs: torch.Tensor | None = None,
    fp4: bool = False,
) -> IntTensor | None:
    """Return the weight with its scales in 16 bits, exactly; None: that is not possible.

    Scales beyond float16's range are divided by a power of two, which goes into their row's
    factor; so does the whole scale of a row that has only one.

    Args:
        scales: [n, k / group] float32.
        zeros: of any integer dtype.
        values, factors, inputs, fp4: as in `IntTensor`.
    """
    groups = scales.shape[1]
    group = values.shape[1] // groups
    if values.shape[1] != groups * group or group % (16 if fp4 else 32):
        return None
    if zeros is not None:
        low, high = (int(end) for end in zeros.aminmax())
        if low < -128 or high > (119 if bits == 4 else 127):
            return None
        zeros = zeros.to(torch.int8)
    scales = scales.float()
    dtype = torch.bfloat16 if fp4 else torch.float16
    if not _fits(scales, dtype).all():
        found = _normalised(scales, dtype)
        if found is None:
            return None
        scales, powers = found
        product = powers if factors is None else factors * powers
        if factors is not None and not _equal(product.double(), factors.double() * powers).all():
            return None
        factors = product
    return IntTensor(values, scales.to(dtype), None, bits, zeros, factors, inputs, fp4)


def _normalised(
    scales: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return scales [n, groups] that fit in `dtype`, and the factors [n] that they lack, or None.

    Rows whose scales fit keep them.
    """
    if scales.shape[1] == 1:
        return torch.ones_like(scales), scales[:, 0]
    largest = scales.abs().nan_to_num(0, 0).amax(1)
    shift = torch.where(_fits(scales, dtype).all(1), 0, _TOP_EXPONENT - largest.frexp().exponent)
    if (shift.abs() > 120).any():  # 2 to this power would leave float32's range
        return None
    moved = torch.ldexp(scales, shift[:, None])
    powers = torch.ldexp(torch.ones_like(largest), -shift)
    return (moved, powers) if _fits(moved, dtype).all() else None


_TOP_EXPONENT = 16
"""Scales that are moved into float16's range are below 2 to this power."""


def _fits(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return which scales, and their halves, which the C kernels read of E2M1, are in `dtype`."""
    if dtype == torch.bfloat16:
        return _equal((scales / 2).to(dtype).float() * 2, scales)
    return _equal(scales.to(dtype).float(), scales)


def _equal(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return where both are the same number, or both are NaN."""
    return (found == expected) | (found.isnan() & expected.isnan())


class IntRows:
    """Makes the method for a weight of 8 or 4 bits whose rows come in parts.

    Args:
        num_rows: of the whole weight.
        dtype: of inputs and results.
        reserve: gives the C kernels' memory while it lasts.
    """

    def __init__(
        self,
        num_rows: int,
        dtype: torch.dtype,
        kernels: Kernels,
        reserve: PageReserve | None = None,
    ) -> None:
        self._num_rows = num_rows
        self._dtype = dtype
        self._reserve = reserve
        self._native = isinstance(kernels, CKernels)
        self.rounds_in_c = self._native and dtype == torch.bfloat16
        self._ints = kernels.ints
        self._weight: Any = None  # with `store`, each in its way

    def store(self, start: int, part: IntTensor) -> None:
        """Store the rows from `start` on, a multiple of 32.

        All parts have the same bits, group, zeros or none, minimums or none, and inputs. A part has
        a multiple of 32 rows, unless it is the last.
        """
        if self._weight is None:
            self._weight = self._panels(part) if self._native else self._empty(part)
        if not self._native:
            self._weight.store(start, part)
        else:
            halves = (part.scales.float() / 2).bfloat16()  # the kernels' numbers are doubled
            scales = halves if part.fp4 else part.scales
            more = part.minimums if part.zeros is None else part.zeros
            self._weight.store(start, part.values, scales, more, part.factors)

    def store_rounded(
        self, start: int, part: torch.Tensor, bits: int, group: int, *, short_inputs: bool = False
    ) -> None:
        """Store plain rows of `dtype`, rounded as `quantize` does; else like `store`."""
        if not self.rounds_in_c:
            rounded = quantize(part, bits, group)
            self.store(start, rounded._replace(short_inputs=short_inputs))
            return
        if self._weight is None:
            sizes = self._num_rows, part.shape[1], group, bits
            kind = W8A8 if short_inputs else PLAIN
            self._weight = IntPanelWeight(*sizes, kind, reserve=self._reserve)
        self._weight.store_rounded(start, part)

    def method(self) -> LinearMethod:
        """Return the method, after all rows were stored."""
        return self._weight

    def _panels(self, part: IntTensor) -> IntPanelWeight:
        k = part.values.shape[1]
        kind = FP4 if part.fp4 else W8A8 if part.short_inputs else PLAIN
        if part.minimums is not None:
            kind = MINIMUMS
        elif part.zeros is not None:
            kind = ZEROS
        group = k // part.scales.shape[1]
        rest = (part.inputs, self._reserve)
        return IntPanelWeight(self._num_rows, k, group, part.bits, kind, *rest)

    def _empty(self, part: IntTensor) -> Any:
        n = self._num_rows
        if self._ints is not None and self._ints.supports(part, self._dtype):
            return self._ints.PackedIntWeight(n, part, self._dtype)
        empty = part.by_rows(lambda rows: rows.new_empty((n, *rows.shape[1:])))
        return IntWeight(empty._replace(factors=None), self._dtype)


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
    becomes its largest number, but a weight that is not a number makes its scale infinite or NaN.
    csrc/linear_int.c computes the same.
    """
    n, k = weight.shape
    groups = weight.to(torch.float32, copy=True).view(n, k // group_size, group_size)
    if bits == 8:
        scales = groups.abs().amax(-1) / 127
    else:
        low, high = groups.amin(-1), groups.amax(-1)  # aminmax takes five times as long
        scales = torch.where(high > -low, high, low) / -8
    scales = scales.clamp(-_FLOAT16_MAX, _FLOAT16_MAX).where(scales.isfinite(), scales).half()
    groups.div_(scales.float().masked_fill_(scales == 0, 1.0)[..., None]).round_()
    limit = 2 ** (bits - 1)
    values = groups.clamp_(-limit, limit - 1).flatten(1).to(torch.int8)
    return IntTensor(values, scales, None, bits)


class IntWeight:
    """A weight of 8 or 4 bits in plain torch, for any device.

    Each product dequantises the weight first, so this saves memory but no time.
    """

    def __init__(self, weight: IntTensor, dtype: torch.dtype) -> None:
        self._weight = weight
        self._dtype = dtype
        self._order = None if weight.inputs is None else weight.inputs.argsort()
        numbers = torch.tensor(FP4_NUMBERS, device=weight.values.device)
        self._numbers = torch.cat([numbers, -numbers])
        if weight.bits == 4:
            self._weight = weight._replace(values=_pairs(weight.values))

    def store(self, start: int, part: IntTensor) -> None:
        """Replace the rows from `start` on by those of `part`."""
        if part.factors is not None and self._weight.factors is None:
            ones = part.factors.new_ones(len(self._weight.values))
            self._weight = self._weight._replace(factors=ones)
        if part.bits == 4:
            part = part._replace(values=_pairs(part.values))
        for name, rows in part.row_tensors().items():
            getattr(self._weight, name)[start : start + len(rows)] = rows

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, self._dequantize(self._weight), bias)

    def embedding(self, ids: torch.Tensor) -> torch.Tensor:
        return self._dequantize(self._weight.by_rows(lambda rows: rows[ids]))

    def _dequantize(self, weight: IntTensor) -> torch.Tensor:
        """Return `weight`, whose values are packed, in the dtype of inputs.

        Products with scales are exact in float32. The factor rounds once, so does the minimum.
        """
        values = weight.values
        if weight.bits == 4:
            values = torch.stack([values << 4 >> 4, values >> 4], -1).flatten(1)
        wide = self._numbers[values.int() + 8] if weight.fp4 else values.float()
        grouped = wide.view(len(values), weight.scales.shape[1], -1)
        if weight.minimums is not None:
            grouped += 8
        if weight.zeros is not None:
            grouped -= weight.zeros[..., None]
        grouped *= weight.scales.float()[..., None]
        if weight.minimums is not None:
            grouped += weight.minimums.float()[..., None]
        if weight.factors is not None:
            grouped *= weight.factors[:, None, None]
        wide = grouped.flatten(1).to(self._dtype)
        return wide if self._order is None else wide[:, self._order]


def _pairs(values: torch.Tensor) -> torch.Tensor:
    """Return values of 4 bits [n, k] as [n, k / 2], the even input in the low half of a byte."""
    return values[:, ::2].bitwise_and(15) | values[:, 1::2] << 4
