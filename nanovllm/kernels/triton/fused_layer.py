"""A decoder layer's linears for a few rows, each with the norm before it and the activation or the
residual after it. 4-bit weights stay packed.

Each program reads a part of the weight, so all rows must fit into one tile. The result for a row
does not depend on the other rows, because any split depends only on the weight's shape.
"""

import torch
import triton

from nanovllm.kernels.triton.fused_kernels import (
    WARPS,
    linear_partials_kernel,
    norm_linear_kernel,
)
from nanovllm.kernels.triton.fused_packed import linear_partials_packed, norm_linear_packed
from nanovllm.kernels.triton.launch import launch_options
from nanovllm.kernels.triton.packed_ints import PackedInts

MAX_ROWS = 16
"""Rows of a tile of the tensor cores."""

PROGRAMS = 192
"""Programs that should read one weight. Two fit an SM of a large GPU. Some weights get fewer,
because splits are multiples of _SPLIT_STEP: 2048 inputs of 1024 outputs get 128."""
_SPLIT_STEP = 512
"""A split of a linear's inputs is a multiple of this, or of the blocks of all warps if packed."""


def norm_linear(
    x: torch.Tensor,
    partials: torch.Tensor | None,
    partials_bias: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor | PackedInts,
    bias: torch.Tensor | None,
    *,
    gated: bool,
    chained: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Finish the previous linear, add it to the residual `x`, normalise, and multiply by `weight`.

    Rounds at the same places as the layers: after the linear, the sum, the norm, its weight, and
    the parts of the activation.

    Args:
        x: [R, size], R at most MAX_ROWS.
        partials: [splits, R, size] float32, which `linear_partials` returned; None: add nothing.
        partials_bias: [size], the bias of that linear.
        norm_weight: [size].
        weight: [outputs, size]; if `gated`, its halves are SwiGLU's gate and up.
        bias: [outputs].
        chained: see `launch.launch_options`.

    Returns:
        [R, outputs], or [R, outputs / 2] of SwiGLU's product; and the new residual [R, size].
    """
    is_packed = isinstance(weight, PackedInts)
    tensors = weight[:5] if is_packed else (weight,)
    rows = len(x)
    outputs = len(tensors[0]) // (1 + gated)
    width = _outputs_per_program(outputs, gated)
    out = x.new_empty(rows, outputs)
    total = x if partials is None else torch.empty_like(x)
    kernel = norm_linear_packed if is_packed else norm_linear_kernel
    kernel[(triton.cdiv(outputs, width),)](
        x, partials, partials_bias, total, norm_weight, eps, *tensors, bias, out, rows,
        OUTPUTS=outputs, SPLITS=0 if partials is None else len(partials), GATED=gated, N=width,
        **_tile(x, weight, x.shape[1], most=1024 // x.itemsize), **launch_options(chained),
    )  # fmt: skip
    return out, total


def linear_partials(
    x: torch.Tensor, weight: torch.Tensor | PackedInts, *, chained: bool
) -> torch.Tensor:
    """Return parts of x times the transpose of `weight`, for `norm_linear` to add up.

    Args:
        x: [R, size], R at most MAX_ROWS.
        weight: [outputs, size].
        chained: see `launch.launch_options`.

    Returns:
        [splits, R, outputs] float32; each part sums over some of the inputs.
    """
    is_packed = isinstance(weight, PackedInts)
    tensors = weight[:5] if is_packed else (weight,)
    rows, size = x.shape
    outputs = len(tensors[0])
    width = _outputs_per_program(outputs, False)
    tiles = triton.cdiv(outputs, width)
    step = 4 * weight.part * WARPS if isinstance(weight, PackedInts) else _SPLIT_STEP
    split = triton.cdiv(triton.cdiv(size, step), triton.cdiv(PROGRAMS, tiles)) * step
    splits = triton.cdiv(size, split)
    partials = x.new_empty(splits, rows, outputs, dtype=torch.float32)
    kernel = linear_partials_packed if is_packed else linear_partials_kernel
    kernel[(tiles, splits)](
        x, *tensors, partials, rows, OUTPUTS=outputs, SPLIT=split, N=width,
        **_tile(x, weight, split, most=32768 // (width * x.itemsize)), **launch_options(chained),
    )  # fmt: skip
    return partials


def _outputs_per_program(outputs: int, gated: bool) -> int:
    """Return the outputs of a program: 32 if that leaves PROGRAMS programs, otherwise 16."""
    return 32 if outputs >= 32 * PROGRAMS and not gated else 16


def _tile(
    x: torch.Tensor, weight: torch.Tensor | PackedInts, inputs: int, most: int
) -> dict[str, int]:
    """Return the size of a program's tiles, R rows and K inputs at once, and of the weight.

    A thread keeps the weights of a tile in at most 64 registers, or in 32 while it has the next
    tile in another 32. Up to 4 rows in half precision, 128 registers let an SM run two programs.
    Few values of R, because each is another compilation.

    Args:
        inputs: that a program reads.
        most: inputs of a tile, if there are several.
    """
    assert x.is_contiguous()
    rows = next(rows for rows in (1, 4, MAX_ROWS) if len(x) <= rows)
    options = {"R": rows, "num_warps": WARPS, "num_stages": 1}
    if isinstance(weight, PackedInts):
        return options | weight.constants()
    assert weight.is_contiguous()
    size = triton.next_power_of_2(min(inputs, x.shape[1]))
    options["K"] = max(size if size <= 2048 // x.itemsize else most, 16 * WARPS)
    options["SIZE"] = x.shape[1]
    return options | ({"maxnreg": 128} if rows <= 4 and x.itemsize == 2 else {})
