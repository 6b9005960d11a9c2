"""The Triton kernels of fused_layer.py for plain weights, and what the other kernels of small steps
share with them.
"""

import triton
import triton.language as tl

from nanovllm.kernels.triton.launch import let_next_begin, wait_for_previous

WARPS = 8
"""Warps of a program. Each multiplies a part of the inputs, so that no warp waits for another, and
a long sum is many short ones."""
PARTS = tl.constexpr(WARPS)
_THREADS = tl.constexpr(32 * WARPS)


@triton.jit
def _load_weights(
    weight, output, start, stop, OUTPUTS: tl.constexpr, SIZE: tl.constexpr, K: tl.constexpr
):
    """Return [warps, N, K / warps]: inputs [start, start + K) of each `output`, up to `stop`."""
    PART: tl.constexpr = K // PARTS
    column = start + tl.arange(0, PARTS)[:, None, None] * PART + tl.arange(0, PART)[None, None, :]
    inside = (output < OUTPUTS)[None, :, None] & (column < stop)
    return tl.load(weight + output[None, :, None] * SIZE + column, inside, 0.0)


@triton.jit
def _multiply(x, weights, acc):
    """Return acc [warps, R, N] + x [R, K] times `weights`, which `_load_weights` returned."""
    R: tl.constexpr = x.shape[0]
    PART: tl.constexpr = weights.shape[2]
    parts = tl.permute(tl.reshape(x, [R, PARTS, PART]), (1, 0, 2))
    return tl.dot(parts, tl.permute(weights, (0, 2, 1)), acc, input_precision="tf32x3")


@triton.jit
def places(row, start, rows, SIZE: tl.constexpr, K: tl.constexpr):
    """Return the places [R, K] of the columns from `start` on, the columns, and which are inside.

    The same threads get the same columns for any R, so that a sum over them has one order.
    """
    column = start + tl.arange(0, K)[None, :]
    place = tl.max_contiguous(row * SIZE + column, [1, K // _THREADS])
    return place, column, (row < rows) & (column < SIZE)


@triton.jit
def sum_parts(
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
def norm_linear_kernel(
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
    for start in tl.range(0, SIZE, K, num_stages=3 if R <= 4 else 1):
        place, column, inside = places(row, start, rows, SIZE, K)
        total = sum_parts(x, partials, partials_bias, place, column, inside, stride, SIZE, SPLITS)
        if SPLITS:  # each tile is stored by one program
            is_ours = start // K % tl.num_programs(0) == tl.program_id(0)
            tl.store(total_out + place, total.to(dtype), inside & is_ours)
        squares += total * total
    scale = tl.rsqrt(tl.sum(squares, 1) / SIZE + eps)[:, None]

    acc = tl.zeros([PARTS, R, N], tl.float32)
    up_acc = tl.zeros([PARTS, R, N], tl.float32)
    for start in range(0, SIZE, K):
        next_weights = _load_weights(weight, output, start + K, SIZE, OUTPUTS, SIZE, K)
        if GATED:
            next_up = _load_weights(up_weight, output, start + K, SIZE, OUTPUTS, SIZE, K)
        if SIZE > K:
            place, column, inside = places(row, start, rows, SIZE, K)
            factors = tl.load(norm_weight + column, column < SIZE, 0.0)
            total = sum_parts(
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
def linear_partials_kernel(
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
    acc = tl.zeros([PARTS, R, N], tl.float32)
    for part in range(0, SPLIT, K):
        column = first + part + tl.arange(0, K)[None, :]
        next_weights = _load_weights(weight, output, first + part + K, stop, OUTPUTS, SIZE, K)
        inputs = tl.load(x + row * SIZE + column, (row < rows) & (column < stop), 0.0)
        acc = _multiply(inputs, weights, acc)
        weights = next_weights
    place = partials + (tl.program_id(1) * rows + row) * OUTPUTS + output[None, :]
    tl.store(place, tl.sum(acc, 0), (row < rows) & (output < OUTPUTS)[None, :])
