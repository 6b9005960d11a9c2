"""The C kernels for bfloat16 on CPUs as functions of tensors.

Knows no layer and no model. Shapes and layouts are not checked: a wrong one corrupts memory.
"""

import math

import torch

from nanovllm.kernels.cpu import library
from nanovllm.kernels.cpu.build import PANEL
from nanovllm.options.sampling_params import GREEDY_BELOW
from nanovllm.utils.memory import lazy_zeros
from nanovllm.utils.pages import PageReserve

_CHUNK = 128
"""Logits of a chunk; see csrc/sampling.c."""
_K_STEP = 256
"""What groups of inputs divide; see csrc/int_weights.h."""


def linear(
    x: torch.Tensor, packed: torch.Tensor, num_outputs: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x [m, k] times the transpose of a packed weight, plus `bias`: [m, num_outputs].

    A row's result is the same, bit for bit, whatever the other rows are.

    Args:
        bias: [num_outputs] bfloat16, contiguous; added in float32, before the sum is rounded.
    """
    m, k = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    y = torch.empty(m, num_outputs, dtype=torch.bfloat16)
    library.call("nv_linear", x, x.stride(0), packed, bias, y, m, num_outputs, k)
    return y


def packed_zeros(n: int, k: int, reserve: PageReserve | None = None) -> torch.Tensor:
    """Return a bfloat16 weight [n, k] of zeros as `linear` reads it: [ceil(n / 32), k / 2, 32, 2].

    Args:
        k: a multiple of 32.
        reserve: gives the memory while it lasts.
    """
    return lazy_zeros((-(-n // PANEL), k // 2, PANEL, 2), torch.bfloat16, reserve)


def pack_rows(rows: torch.Tensor, packed: torch.Tensor, start: int) -> None:
    """Write `rows` [m, k] of a weight, the first of which is its row `start`, to `packed`.

    Args:
        start: a multiple of 32; so is m, unless these are the last rows of the weight.
    """
    library.call("nv_pack", rows.contiguous(), packed[start // PANEL :], *rows.shape)


def gather(ids: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Return rows `ids` [t] int64 of a packed weight: [t, k]."""
    k = packed.shape[1] * 2
    y = torch.empty(len(ids), k, dtype=torch.bfloat16)
    library.call("nv_gather", ids.contiguous(), packed, y, len(ids), k)
    return y


def int_zeros(
    n: int, k: int, group: int, bits: int, rows_of_group: int, reserve: PageReserve | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the memory of a weight [n, k] of 8 or 4 bits and its scales, as `linear_int` reads it.

    Args:
        group: inputs that share a scale, a multiple of 32; of 16 for E2M1.
        rows_of_group: 2 with minimums or zeros, else 1.
        reserve: gives the memory while it lasts.

    Returns:
        The weight, uint8, and its scales in 16 bits: [ceil(n / 32), k / kernel's group, 32].
        Minimums or zeros lie beside them: [ceil(n / 32), k / kernel's group, 2, 32].
    """
    panels, groups = -(-n // PANEL), k // math.gcd(group, _K_STEP)
    packed = lazy_zeros((panels, k * PANEL * bits // 8), torch.uint8, reserve)
    shape = (panels, groups, PANEL) if rows_of_group == 1 else (panels, groups, 2, PANEL)
    return packed, lazy_zeros(shape, torch.float16, reserve)


def pack_int_rows(
    values: torch.Tensor,
    scales: torch.Tensor,
    more: torch.Tensor | None,
    packed: torch.Tensor,
    packed_scales: torch.Tensor,
    start: int,
) -> None:
    """Write rows of a weight, the first of which is its row `start`, to memory of `int_zeros`.

    Args:
        values: [m, k] int8; within [-8, 7] for 4 bits.
        scales: [m, k / group], of 16 bits.
        more: minimums, or int16 zeros as csrc/int_weights.h has them: of the shape of `scales`.
        start: a multiple of 32; so is m, unless these are the last rows of the weight.
    """
    values, scales = values.contiguous(), scales.contiguous()
    more = None if more is None else more.contiguous()
    m, k = values.shape
    panel = start // PANEL
    source, group = k // scales.shape[1], k // packed_scales.shape[1]
    bits = packed.shape[1] * 8 // (k * PANEL)
    places = packed[panel:], packed_scales[panel:]
    library.call("nv_pack_int", values, scales, more, *places, m, k, source, group, bits)


def pack_int(
    values: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor | None, bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an 8-bit or 4-bit weight and its scales in the layouts that `linear_int` reads.

    Args:
        values, scales: see `pack_int_rows`.
        minimums: None, or with 4 bits [n, k / group] float16: a weight is then
            scale * (value + 8) + minimum.
    """
    n, k = values.shape
    rows_of_group = 1 if minimums is None else 2
    packed = int_zeros(n, k, k // scales.shape[1], bits, rows_of_group)
    pack_int_rows(values, scales, minimums, *packed, 0)
    return packed


def kind_of(scales: torch.Tensor, fp4: bool, zeros: bool = False) -> int:
    """Return the number of the kind of a weight of `int_zeros`, for the kernels.

    Args:
        fp4: whether its values plus 8 are the bits of E2M1 numbers, and the bits of its scales are
            those of bfloat16: a weight is scale * twice the number.
        zeros: whether zeros lie beside its scales, not minimums.
    """
    return 3 if zeros else 2 if fp4 else int(scales.dim() == 4)  # with minimums


def linear_int(
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    num_outputs: int,
    bits: int,
    bias: torch.Tensor | None = None,
    kind: int | None = None,
    factors: torch.Tensor | None = None,
    inputs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x [m, k] times the transpose of a weight of `int_zeros`, plus `bias`.

    A row's result [num_outputs] is the same, bit for bit, whatever the other rows are.

    Args:
        bias: [num_outputs] bfloat16, contiguous; added in float32, before the sum is rounded.
        kind: see `kind_of`; None: with minimums if `scales` says so.
        factors: [outputs of whole panels] float32, which multiply the sums.
        inputs: [k] int32, which input of x belongs to each column of the weight.
    """
    m, k = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    y = torch.empty(m, num_outputs, dtype=torch.bfloat16)
    kind = kind_of(scales, fp4=False) if kind is None else kind
    tensors = packed, scales, factors, inputs, bias, y
    sizes = m, num_outputs, k, k // scales.shape[1], bits, kind
    library.call("nv_linear_int", x, x.stride(0), *tensors, *sizes)
    return y


def gather_int(
    ids: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    bits: int,
    kind: int | None = None,
    factors: torch.Tensor | None = None,
    inputs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return rows `ids` [t] int64 of a weight as `linear_int` has it: [t, k]."""
    k = packed.shape[1] * 8 // (PANEL * bits)
    y = torch.empty(len(ids), k, dtype=torch.bfloat16)
    kind = kind_of(scales, fp4=False) if kind is None else kind
    sizes = len(ids), k, k // scales.shape[1], bits, kind
    library.call("nv_gather_int", ids.contiguous(), packed, scales, factors, inputs, y, *sizes)
    return y


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """Do what `Kernels.greedy` says, for [r, n] of any float dtype."""
    return _sample(logits, None)


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
) -> torch.Tensor:
    """Do what `Kernels.sample` says, for [r, n] of any float dtype."""
    columns = (temperatures, seeds, positions, top_ks, top_ps, min_ps)
    return _sample(logits, columns)


def _sample(logits: torch.Tensor, columns: tuple[torch.Tensor, ...] | None) -> torch.Tensor:
    if logits.dtype == torch.float16:
        logits = logits.float()
    logits = logits.contiguous()
    rows, n = logits.shape
    out = torch.empty(rows, dtype=torch.int64)
    maxima = torch.empty(rows, -(-n // _CHUNK), dtype=torch.float32)
    sums = scratch = None
    if columns is not None:
        sums = torch.empty_like(maxima)
        scratch = torch.empty(rows, n, dtype=torch.float32)
    bits = 8 * logits.element_size()
    inputs = (logits, bits, *(columns or (None,) * 6))
    library.call("nv_sample", *inputs, maxima, sums, scratch, out, rows, n, GREEDY_BELOW)
    return out


def to_float(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of x, contiguous and bfloat16, in float32."""
    out = torch.empty(x.shape, dtype=torch.float32)
    library.call("nv_to_float", x, out, x.numel())
    return out


def forbid(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    library.call("nv_forbid", logits, rows, masks, *masks.shape, logits.shape[1])
