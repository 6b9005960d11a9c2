"""A decoder layer's linears for a few rows, each with the norm before it and the activation or the
residual after it.

Each program reads a part of the weight, so all rows must fit into one tile. The result for a row
does not depend on the other rows, because any split depends only on the weight's shape.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.triton.launch import launch_options, let_next_begin, wait_for_previous

MAX_ROWS = 4  # with more rows the layers were faster on an H200

PROGRAMS = 192
"""Programs that should read one weight. Two fit an SM of a large GPU. Some weights get fewer,
because splits are multiples of _SPLIT_STEP: 2048 inputs of 1024 outputs get 128."""
_SPLIT_STEP = 512  # a split of a linear's inputs is a multiple of this
_WARPS = 8
"""Warps of a program. Each multiplies a part of the inputs, so that no warp waits for another, and
a long sum is many short ones."""
_PARTS = tl.constexpr(_WARPS)
_THREADS = tl.constexpr(32 * _WARPS)


def norm_linear(
    x: torch.Tensor,
    partials: torch.Tensor | None,
    partials_bias: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
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
        partials: what `linear_partials` returned; None: add nothing.
        partials_bias: [size], the bias of that linear.
        weight: [outputs, size]; if `gated`, its halves are SwiGLU's gate and up.
        chained: see `launch.launch_options`.

    Returns:
        [R, outputs], or [R, outputs / 2] of SwiGLU's product; and the new residual [R, size].
    """
    rows = len(x)
    outputs = len(weight) // (1 + gated)
    width = _outputs_per_program(outputs, gated)
    out = x.new_empty(rows, outputs)
    total = x if partials is None else torch.empty_like(x)
    _norm_linear[(triton.cdiv(outputs, width),)](
        x, partials, partials_bias, total, norm_weight, eps, weight, bias, out, rows,
        OUTPUTS=outputs, SPLITS=0 if partials is None else len(partials), GATED=gated, N=width,
        **_tile(x, weight, x.shape[1], most=512), **launch_options(chained),
    )  # fmt: skip
    return out, total


def linear_partials(x: torch.Tensor, weight: torch.Tensor, *, chained: bool) -> torch.Tensor:
    """Return parts of x times the transpose of `weight`, for `norm_linear` to add up: [splits, R,
    outputs] float32. Each sums over some of the inputs.
    """
    rows, size = x.shape
    outputs = len(weight)
    width = _outputs_per_program(outputs, False)
    tiles = triton.cdiv(outputs, width)
    steps = triton.cdiv(triton.cdiv(size, _SPLIT_STEP), triton.cdiv(PROGRAMS, tiles))
    split = steps * _SPLIT_STEP
    splits = triton.cdiv(size, split)
    partials = x.new_empty(splits, rows, outputs, dtype=torch.float32)
    _linear_partials[(tiles, splits)](
        x, weight, partials, rows, OUTPUTS=outputs, SPLIT=split, N=width,
        **_tile(x, weight, split, most=16384 // width), **launch_options(chained),
    )  # fmt: skip
    return partials


def _outputs_per_program(outputs: int, gated: bool) -> int:
    """Return the outputs of a program: 32 if that leaves PROGRAMS programs, otherwise 16."""
    return 32 if outputs >= 32 * PROGRAMS and not gated else 16


def _tile(x: torch.Tensor, weight: torch.Tensor, inputs: int, most: int) -> dict[str, int]:
    """Return the size of a program's tiles, R rows and K inputs at once, and of the weight.

    A thread keeps the weights of a tile in at most 64 registers, or in 32 while it has the next
    tile in another 32. 128 registers let an SM run two programs.

    Args:
        inputs: that a program reads.
        most: inputs of a tile, if there are several.
    """
    assert x.is_contiguous()
    assert weight.is_contiguous()
    size = triton.next_power_of_2(min(inputs, x.shape[1]))
    return {
        "R": 1 if len(x) == 1 else MAX_ROWS,
        "K": max(size if size <= 1024 else most, 16 * _WARPS),
        "SIZE": x.shape[1],
        "num_warps": _WARPS,
        "num_stages": 1,
        "maxnreg": 128,
    }


@triton.jit
def _load_weights(
    weight, output, start, stop, OUTPUTS: tl.constexpr, SIZE: tl.constexpr, K: tl.constexpr
):
    """Return [warps, N, K / warps]: inputs [start, start + K) of each `output`, up to `stop`."""
    PART: tl.constexpr = K // _PARTS
    column = start + tl.arange(0, _PARTS)[:, None, None] * PART + tl.arange(0, PART)[None, None, :]
    inside = (output < OUTPUTS)[None, :, None] & (column < stop)
    return tl.load(weight + output[None, :, None] * SIZE + column, inside, 0.0)


@triton.jit
def _multiply(x, weights, acc):
    """Return acc [warps, R, N] + x [R, K] times `weights`, which `_load_weights` returned."""
    R: tl.constexpr = x.shape[0]
    PART: tl.constexpr = weights.shape[2]
    parts = tl.permute(tl.reshape(x, [R, _PARTS, PART]), (1, 0, 2))
    return tl.dot(parts, tl.permute(weights, (0, 2, 1)), acc)


@triton.jit
def _places(row, start, rows, SIZE: tl.constexpr, K: tl.constexpr):
    """Return the places [R, K] of the columns from `start` on, the columns, and which are inside.

    The same threads get the same columns for any R, so that a sum over them has one order.
    """
    column = start + tl.arange(0, K)[None, :]
    place = tl.max_contiguous(row * SIZE + column, [1, K // _THREADS])
    return place, column, (row < rows) & (column < SIZE)


@triton.jit
def _sum_parts(
    x, partials, bias, place, column, inside, stride, SIZE: tl.constexpr, SPLITS: tl.constexpr
):
    """Return [R, K] float32: x plus the linear that `partials` are parts of, rounded."""
    dtype = x.dtype.element_ty
    total = tl.load(x + place, inside, 0.0).to(tl.float32)
    if SPLITS:
        added = tl.load(partials + place, inside, 0.0)
        for split in tl.static_range(1, SPLITS):
            added += tl.load(partials + split * stride + place, inside, 0.0)
        if bias is not None:
            added += tl.load(bias + column, column < SIZE, 0.0).to(tl.float32)
        total = (total + added.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["rows"])
def _norm_linear(
    x, partials, partials_bias, total_out, norm_weight, eps, weight, bias, out, rows,
    SIZE: tl.constexpr, OUTPUTS: tl.constexpr, SPLITS: tl.constexpr, GATED: tl.constexpr,
    R: tl.constexpr, N: tl.constexpr, K: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Compute N outputs of all rows. Each program normalises the rows anew."""
    let_next_begin(CHAINED)
    dtype = x.dtype.element_ty
    output = (tl.program_id(0) * N + tl.arange(0, N)).to(tl.int64)
    up_weight = weight + OUTPUTS * SIZE
    column = tl.arange(0, K)[None, :]
    factors = tl.load(norm_weight + column, column < SIZE, 0.0)
    weights = _load_weights(weight, output, 0, SIZE, OUTPUTS, SIZE, K)
    if GATED:
        up_weights = _load_weights(up_weight, output, 0, SIZE, OUTPUTS, SIZE, K)
    wait_for_previous(CHAINED)
    row = tl.arange(0, R)[:, None]
    stride = rows * SIZE
    squares = tl.zeros([R, K], tl.float32)
    total = tl.zeros([R, K], tl.float32)
    for start in tl.range(0, SIZE, K, num_stages=3):
        place, column, inside = _places(row, start, rows, SIZE, K)
        total = _sum_parts(x, partials, partials_bias, place, column, inside, stride, SIZE, SPLITS)
        if SPLITS:  # each tile is stored by one program
            is_ours = start // K % tl.num_programs(0) == tl.program_id(0)
            tl.store(total_out + place, total.to(dtype), inside & is_ours)
        squares += total * total
    scale = tl.rsqrt(tl.sum(squares, 1) / SIZE + eps)[:, None]

    acc = tl.zeros([_PARTS, R, N], tl.float32)
    up_acc = tl.zeros([_PARTS, R, N], tl.float32)
    for start in range(0, SIZE, K):
        next_weights = _load_weights(weight, output, start + K, SIZE, OUTPUTS, SIZE, K)
        if GATED:
            next_up = _load_weights(up_weight, output, start + K, SIZE, OUTPUTS, SIZE, K)
        if SIZE > K:
            place, column, inside = _places(row, start, rows, SIZE, K)
            factors = tl.load(norm_weight + column, column < SIZE, 0.0)
            total = _sum_parts(
                x, partials, partials_bias, place, column, inside, stride, SIZE, SPLITS
            )
        normed = (total * scale).to(dtype).to(tl.float32) * factors.to(tl.float32)
        acc = _multiply(normed.to(dtype), weights, acc)
        weights = next_weights
        if GATED:
            up_acc = _multiply(normed.to(dtype), up_weights, up_acc)
            up_weights = next_up

    result = tl.sum(acc, 0)
    if bias is not None:
        result += tl.load(bias + output, output < OUTPUTS, 0.0).to(tl.float32)[None, :]
    if GATED:
        up = tl.sum(up_acc, 0)
        if bias is not None:
            up += tl.load(bias + OUTPUTS + output, output < OUTPUTS, 0.0).to(tl.float32)[None, :]
        gate = result.to(dtype).to(tl.float32)
        up = up.to(dtype).to(tl.float32)
        result = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up
    place = out + row * OUTPUTS + output[None, :]
    tl.store(place, result.to(dtype), (row < rows) & (output < OUTPUTS)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _linear_partials(
    x, weight, partials, rows, SIZE: tl.constexpr, OUTPUTS: tl.constexpr, SPLIT: tl.constexpr,
    R: tl.constexpr, N: tl.constexpr, K: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Compute one part of N outputs of all rows: the sum over SPLIT inputs."""
    let_next_begin(CHAINED)
    output = (tl.program_id(0) * N + tl.arange(0, N)).to(tl.int64)
    first = tl.program_id(1) * SPLIT
    stop = tl.minimum(first + SPLIT, SIZE)
    weights = _load_weights(weight, output, first, stop, OUTPUTS, SIZE, K)
    wait_for_previous(CHAINED)
    row = tl.arange(0, R)[:, None]
    acc = tl.zeros([_PARTS, R, N], tl.float32)
    for part in range(0, SPLIT, K):
        column = first + part + tl.arange(0, K)[None, :]
        next_weights = _load_weights(weight, output, first + part + K, stop, OUTPUTS, SIZE, K)
        inputs = tl.load(x + row * SIZE + column, (row < rows) & (column < stop), 0.0)
        acc = _multiply(inputs, weights, acc)
        weights = next_weights
    place = partials + (tl.program_id(1) * rows + row) * OUTPUTS + output[None, :]
    tl.store(place, tl.sum(acc, 0), (row < rows) & (output < OUTPUTS)[None, :])
