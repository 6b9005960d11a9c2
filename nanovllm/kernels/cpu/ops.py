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


def packed_zeros(n: int, k: int, reserve: PageReserve | None = None) -> torch.Tensor:
    """Return a bfloat16 weight [n, k] of zeros in panels: [ceil(n / 32), k / 2, 32, 2].

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


def int_zeros(
    n: int, k: int, group: int, bits: int, rows_of_group: int, reserve: PageReserve | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the memory of a weight [n, k] of 8 or 4 bits and its scales, in panels.

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
    """Return an 8-bit or 4-bit weight and its scales in panels.

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
