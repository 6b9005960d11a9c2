"""The kernels of fused_layer.py for weights of 4 bits, which stay packed.

Each warp multiplies with one block of inputs at a time: a word's nibbles are its four parts. Knows
no attention and no model.
"""

import triton
import triton.language as tl

from nanovllm.kernels.triton.fused_kernels import PARTS, places, sum_parts
from nanovllm.kernels.triton.int4 import scale_and_shift, to_numbers
from nanovllm.kernels.triton.launch import let_next_begin, wait_for_previous


@triton.jit
def _load_words(words, output, is_output, block, SIZE: tl.constexpr, PART: tl.constexpr):
    """Return the words [warps, N, PART] of `block` [warps] of each output."""
    BLOCKS: tl.constexpr = (SIZE + 4 * PART - 1) // (4 * PART)
    column = block[:, None, None] * PART + tl.arange(0, PART)[None, None, :]
    inside = is_output[None, :, None] & (block < BLOCKS)[:, None, None]
    return tl.load(words + output[None, :, None] * (BLOCKS * PART) + column, inside, 0)


@triton.jit
def _columns(block, index, PART: tl.constexpr):
    """Return the inputs [1, warps * PART] of part `index` of each of the blocks."""
    start = block * (4 * PART) + index * PART
    column = start[:, None] + tl.arange(0, PART)[None, :]
    return tl.reshape(column, [1, PARTS * PART])


@triton.jit
def _multiply(
    x, words, index, groups, output, is_output, block, acc, ROWS: tl.constexpr,
    SIZE: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Return acc [warps, R, N] plus x [R, warps * PART] times part `index` of the words.

    Args:
        ROWS: of the weight.
    """
    R: tl.constexpr = x.shape[0]
    parts = tl.permute(tl.reshape(x, [R, PARTS, PART]), (1, 0, 2))
    number = to_numbers(words, index, x.dtype, KIND)
    start = (block * (4 * PART) + index * PART)[:, None]
    scale, shift = scale_and_shift(
        groups, output[None, :], is_output[None, :], start, ROWS, SIZE, GROUP
    )
    acc += tl.dot(parts, tl.permute(number, (0, 2, 1))) * scale[:, None, :]
    if groups[1] is not None or groups[2] is not None:
        ones = tl.full([PARTS, PART, acc.shape[2]], 1.0, x.dtype)
        acc += tl.dot(parts, ones) * shift[:, None, :]
    return acc


@triton.jit
def _finish(acc, factors, bias, output, is_output):
    """Return the sum [R, N] over the warps, times the rows' factors, plus `bias`."""
    result = tl.sum(acc, 0)
    if factors is not None:
        result *= tl.load(factors + output, is_output, 0.0)[None, :]
    if bias is not None:
        result += tl.load(bias + output, is_output, 0.0).to(tl.float32)[None, :]
    return result


@triton.jit
def _norm_factor(
    x, partials, partials_bias, total_out, eps, row, rows, SIZE: tl.constexpr, SPLITS: tl.constexpr
):
    """Store the new residual, a part in each program; return the factors [R, 1] of the norm."""
    K: tl.constexpr = 512  # with more inputs at once, 16 rows take too many registers
    squares = tl.zeros([row.shape[0], K], tl.float32)
    for start in range(0, SIZE, K):
        place, column, inside = places(row, start, rows, SIZE, K)
        total = sum_parts(
            x, partials, partials_bias, place, column, inside, rows * SIZE, SIZE, SPLITS
        )
        if SPLITS:  # each tile is stored by one program
            is_ours = start // K % tl.num_programs(0) == tl.program_id(0)
            tl.store(total_out + place, total.to(x.dtype.element_ty), inside & is_ours)
        squares += total * total
    return tl.rsqrt(tl.sum(squares, 1) / SIZE + eps)[:, None]


@triton.jit(do_not_specialize=["rows"])
def norm_linear_packed(
    x, partials, partials_bias, total_out, norm_weight, eps,
    words, scales, zeros, minimums, factors, bias, out, rows,
    SIZE: tl.constexpr, OUTPUTS: tl.constexpr, SPLITS: tl.constexpr, GATED: tl.constexpr,
    GROUP: tl.constexpr, PART: tl.constexpr, KIND: tl.constexpr,
    R: tl.constexpr, N: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Compute N outputs of all rows. Each program normalises the rows anew."""
    let_next_begin(CHAINED)
    dtype: tl.constexpr = x.dtype.element_ty
    BLOCKS: tl.constexpr = (SIZE + 4 * PART - 1) // (4 * PART)
    ROWS: tl.constexpr = OUTPUTS * 2 if GATED else OUTPUTS
    groups = scales, zeros, minimums
    output = (tl.program_id(0) * N + tl.arange(0, N)).to(tl.int64)
    is_output = output < OUTPUTS
    warp = tl.arange(0, PARTS)
    found = _load_words(words, output, is_output, warp, SIZE, PART)
    if GATED:
        found_up = _load_words(words, output + OUTPUTS, is_output, warp, SIZE, PART)
    wait_for_previous(CHAINED)
    row = tl.arange(0, R)[:, None]
    stride = rows * SIZE
    factor = _norm_factor(x, partials, partials_bias, total_out, eps, row, rows, SIZE, SPLITS)
    acc = tl.zeros([PARTS, R, N], tl.float32)
    up_acc = tl.zeros([PARTS, R, N], tl.float32)
    for start in range(0, BLOCKS, PARTS):
        block = start + warp
        following = _load_words(words, output, is_output, block + PARTS, SIZE, PART)
        if GATED:
            following_up = _load_words(
                words, output + OUTPUTS, is_output, block + PARTS, SIZE, PART
            )
        for index in tl.static_range(4):
            column = _columns(block, index, PART)
            place, inside = row * SIZE + column, (row < rows) & (column < SIZE)
            total = sum_parts(
                x, partials, partials_bias, place, column, inside, stride, SIZE, SPLITS
            )
            weight = tl.load(norm_weight + column, column < SIZE, 0.0).to(tl.float32)
            normed = ((total * factor).to(dtype).to(tl.float32) * weight).to(dtype)
            acc = _multiply(
                normed, found, index, groups, output, is_output, block, acc,
                ROWS, SIZE, GROUP, PART, KIND,
            )  # fmt: skip
            if GATED:
                up_acc = _multiply(
                    normed, found_up, index, groups, output + OUTPUTS, is_output, block, up_acc,
                    ROWS, SIZE, GROUP, PART, KIND,
                )  # fmt: skip
        found = following
        if GATED:
            found_up = following_up

    result = _finish(acc, factors, bias, output, is_output)
    if GATED:
        up = _finish(up_acc, factors, bias, output + OUTPUTS, is_output)
        gate, up = result.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
        result = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up
    tl.store(out + row * OUTPUTS + output[None, :], result.to(dtype), (row < rows) & is_output)


@triton.jit(do_not_specialize=["rows"])
def linear_partials_packed(
    x, words, scales, zeros, minimums, factors, partials, rows,
    SIZE: tl.constexpr, OUTPUTS: tl.constexpr, SPLIT: tl.constexpr, GROUP: tl.constexpr,
    PART: tl.constexpr, KIND: tl.constexpr, R: tl.constexpr, N: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Compute one part of N outputs of all rows: the sum over SPLIT inputs."""
    let_next_begin(CHAINED)
    STEPS: tl.constexpr = SPLIT // (4 * PART * PARTS)
    groups = scales, zeros, minimums
    output = (tl.program_id(0) * N + tl.arange(0, N)).to(tl.int64)
    is_output = output < OUTPUTS
    first = tl.program_id(1) * STEPS * PARTS + tl.arange(0, PARTS)
    found = _load_words(words, output, is_output, first, SIZE, PART)
    wait_for_previous(CHAINED)
    row = tl.arange(0, R)[:, None]
    acc = tl.zeros([PARTS, R, N], tl.float32)
    for step in range(STEPS):
        block = first + step * PARTS
        following = _load_words(words, output, is_output, block + PARTS, SIZE, PART)
        for index in tl.static_range(4):
            column = _columns(block, index, PART)
            inputs = tl.load(x + row * SIZE + column, (row < rows) & (column < SIZE), 0.0)
            acc = _multiply(
                inputs, found, index, groups, output, is_output, block, acc,
                OUTPUTS, SIZE, GROUP, PART, KIND,
            )  # fmt: skip
        found = following
    place = partials + (tl.program_id(1) * rows + row) * OUTPUTS + output[None, :]
    result = _finish(acc, factors, None, output, is_output)
    tl.store(place, result, (row < rows) & is_output)
