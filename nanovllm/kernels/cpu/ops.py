"""The C kernels for bfloat16 on CPUs as functions of tensors.

Knows no layer and no model. Shapes and layouts are not checked: a wrong one corrupts memory.
"""

import torch

from nanovllm.kernels.cpu import library
from nanovllm.kernels.cpu.build import PANEL
from nanovllm.options.sampling_params import GREEDY_BELOW
from nanovllm.utils.memory import lazy_zeros
from nanovllm.utils.pages import PageReserve

_CHUNK = 128
"""Logits of a chunk; see csrc/sampling.c."""


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


def pack_int(
    values: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor | None, bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an 8-bit or 4-bit weight and its scales in the layouts that `linear_int` reads.

    Args:
        values: [n, k] int8; within [-8, 7] for 4 bits.
        scales: [n, k / group] float16. With 8 bits, group is 32, 64, 128 or 256; with 4 bits it
            is 32.
        minimums: None, or with 4 bits [n, k / group] float16: a weight is then
            scale * (value + 8) + minimum.

    Returns:
        The weight, and the scales [ceil(n / 32), k / group, 32]. With minimums these lie beside
        the scales: [ceil(n / 32), k / group, 2, 32].
    """
    values, scales = values.contiguous(), scales.contiguous()
    minimums = None if minimums is None else minimums.contiguous()
    n, k = values.shape
    groups, panels = scales.shape[1], -(-n // PANEL)
    packed = lazy_zeros((panels, k * PANEL * bits // 8), torch.uint8)
    shape = (panels, groups, PANEL) if minimums is None else (panels, groups, 2, PANEL)
    packed_scales = torch.empty(shape, dtype=torch.float16)
    library.call(
        "nv_pack_int", values, scales, minimums, packed, packed_scales, n, k, k // groups, bits
    )
    return packed, packed_scales


def kind_of(scales: torch.Tensor, fp4: bool) -> int:
    """Return the number of the kind of a weight from `pack_int`, for the kernels.

    Args:
        fp4: whether its values plus 8 are the bits of E2M1 numbers, and the bits of its scales are
            those of bfloat16: a weight is scale * twice the number.
    """
    return 2 if fp4 else int(scales.dim() == 4)  # with minimums


def linear_int(
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    num_outputs: int,
    bits: int,
    bias: torch.Tensor | None = None,
    fp4: bool = False,
) -> torch.Tensor:
    """Return x [m, k] times the transpose of a weight from `pack_int`, plus `bias`.

    A row's result [num_outputs] is the same, bit for bit, whatever the other rows are.

    Args:
        fp4: see `kind_of`.
        bias: [num_outputs] bfloat16, contiguous; added in float32, before the sum is rounded.
    """
    m, k = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    y = torch.empty(m, num_outputs, dtype=torch.bfloat16)
    library.call(
        "nv_linear_int",
        x,
        x.stride(0),
        packed,
        scales,
        bias,
        y,
        m,
        num_outputs,
        k,
        k // scales.shape[1],
        bits,
        kind_of(scales, fp4),
    )
    return y


def gather_int(
    ids: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, bits: int, fp4: bool = False
) -> torch.Tensor:
    """Return rows `ids` [t] int64 of a weight from `pack_int`: [t, k]."""
    k = packed.shape[1] * 8 // (PANEL * bits)
    y = torch.empty(len(ids), k, dtype=torch.bfloat16)
    sizes = len(ids), k, k // scales.shape[1], bits, kind_of(scales, fp4)
    library.call("nv_gather_int", ids.contiguous(), packed, scales, y, *sizes)
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
