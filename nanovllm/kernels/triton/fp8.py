"""FP8 (E4M3) in Triton: groupwise quantisation, and the product of groupwise quantised matrices.

The result for a row does not depend on the other rows of the batch. The host never waits for the
device, so a CUDA graph can hold every call. Imports triton: check
`platform.cuda.triton_available` first.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.triton import split_k
from nanovllm.kernels.triton.split_k import add_splits, plan_launch

FP8 = torch.float8_e4m3fn
new_counters = split_k.new_counters

_LIMIT = torch.finfo(FP8).max
_MAX_INPUTS = 128
"""Maximum inputs of one `tl.dot`, whose products the tensor cores sum with few bits."""
_MIN_INPUTS = 32  # minimum inputs of one `tl.dot` with FP8 operands
_SPLIT_PROGRAMS = 264
"""Maximum programs of a tile of rows whose inputs are split: two for each SM of an H100."""
_MANY = {"M": 64, "N": 128, "SPLITS": 1, "num_warps": 4, "num_stages": 3}
"""The launch options for more than 64 rows."""


def quantize(x: torch.Tensor, group: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Round x [t, n] to float8_e4m3fn values [t, n] with float32 scales [t, ceil(n / group)].

    The scale maps the largest magnitude of a group to 448, the largest float8_e4m3fn. A group is
    `group` neighbours in a row (None: the whole row).
    """
    assert x.is_contiguous()
    rows, size = x.shape
    group = group or max(size, 1)
    groups = triton.cdiv(size, group)
    values = torch.empty_like(x, dtype=FP8)
    scales = x.new_empty(rows, groups, dtype=torch.float32)
    block = min(triton.next_power_of_2(group), 4096)
    if values.numel():
        _quantize_fp8[(rows, groups)](
            x, values, scales, LIMIT=_LIMIT, SIZE=size, GROUP=group, BLOCK=block,
            num_warps=max(block // 512, 1),
        )  # fmt: skip
    return values, scales


def inputs_of_a_step(group: int) -> int:
    """Return how many inputs `multiply` processes at once, or 0 if it does not support `group`."""
    step = min(group & -group, _MAX_INPUTS)
    return step if step >= _MIN_INPUTS else 0


def multiply(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    group: int,
    dtype: torch.dtype,
    splits_done: torch.Tensor,
) -> torch.Tensor:
    """Return x times the transpose of `weight`: [t, n] of `dtype`.

    The tensor cores sum the products of at most one group. The kernel scales these sums and adds
    them in float32. This bounds the error of the tensor cores, whose sums have fewer bits
    (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).

    With few rows and few outputs the inputs are split as well. The program that finishes the last
    split of a tile adds up all of them, in their order.

    Args:
        x: [t, k] float8_e4m3fn, contiguous.
        x_scales: [t, ceil(k / group)] float32, contiguous.
        weight: [n, k] float8_e4m3fn, contiguous.
        weight_scales: [n, ceil(k / group)] float32, contiguous.
        group: number of inputs that share a scale; `inputs_of_a_step(group)` must not be 0.
        splits_done: from `new_counters`. Launches that share it must run one after another.
    """
    rows, size = x.shape
    outputs = len(weight)
    assert all(t.is_contiguous() for t in (x, x_scales, weight, weight_scales))
    y = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    step = inputs_of_a_step(group)
    steps = triton.cdiv(size, step)
    programs, partial, options = plan_launch(x, outputs, steps, _SPLIT_PROGRAMS, _MANY)
    if rows:
        _multiply_fp8[(programs,)](
            x, x_scales, weight, weight_scales, y, partial, splits_done, rows,
            OUTPUTS=outputs, SIZE=size, GROUP=group, STEP=step, **options,
        )  # fmt: skip
    return y


@triton.jit
def to_fp8(x, LIMIT: tl.constexpr):
    """Return float32 numbers in float8_e4m3fn: to nearest, ties to even, at most LIMIT. NaN stays.

    Triton then converts what 8 bits can hold. Else, for compute capability 8.9, it would truncate
    to float16 first.
    """
    x = tl.clamp(x, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + (bits >> 20 & 1)) & -0x100000).to(tl.float32, bitcast=True)
    subnormal = (x + 24576.0) - 24576.0  # 1.5 * 2^14: rounds to multiples of 2^-9
    rounded = tl.where(tl.abs(x) < 0.015625, subnormal, normal)
    return tl.where(x == x, rounded, x).to(tl.float8e4nv)


@triton.jit
def _quantize_fp8(
    x, values, scales,
    LIMIT: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Quantise one group of a row. Read it twice, first for its scale, then for its values."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    end = tl.minimum((group + 1) * GROUP, SIZE)
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, GROUP, BLOCK):
        at = group * GROUP + start + columns
        part = tl.load(x + row * SIZE + at, at < end, 0.0)
        largest = tl.maximum(largest, tl.abs(part.to(tl.float32)))
    scale = tl.max(largest) / LIMIT
    scale = tl.where(scale > 0, scale, 1.0)
    tl.store(scales + row * tl.num_programs(1) + group, scale)
    for start in range(0, GROUP, BLOCK):
        at = group * GROUP + start + columns
        part = tl.load(x + row * SIZE + at, at < end, 0.0).to(tl.float32)
        tl.store(values + row * SIZE + at, to_fp8(part / scale, LIMIT), at < end)


@triton.jit(do_not_specialize=["rows"])
def _multiply_fp8(
    x, x_scales, weight, weight_scales, y, partial, splits_done, rows,
    OUTPUTS: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Compute one split of a tile of y, and y if it is the tile's last split to end.

    Programs with neighbouring ids read the same rows of the weight, which the L2 then holds.
    """
    GROUPS: tl.constexpr = (SIZE + GROUP - 1) // GROUP
    STEPS: tl.constexpr = (SIZE + STEP - 1) // STEP
    tile = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    row_tiles = tl.cdiv(rows, M)
    row = (tile % row_tiles * M + tl.arange(0, M)).to(tl.int64)
    output = (tile // row_tiles * N + tl.arange(0, N)).to(tl.int64)
    inputs = tl.arange(0, STEP)
    is_row = row < rows
    is_output = output < OUTPUTS
    acc = tl.zeros([M, N], tl.float32)
    for step in range(STEPS * split // SPLITS, STEPS * (split + 1) // SPLITS):
        start = step * STEP
        of_x = is_row[:, None]
        of_weight = is_output[:, None]
        if SIZE % STEP:
            inside = (start + inputs < SIZE)[None, :]
            of_x = of_x & inside
            of_weight = of_weight & inside
        a = tl.load(x + row[:, None] * SIZE + start + inputs[None, :], of_x, 0.0)
        b = tl.load(weight + output[:, None] * SIZE + start + inputs[None, :], of_weight, 0.0)
        group = start // GROUP
        a_scale = tl.load(x_scales + row * GROUPS + group, is_row, 0.0)
        b_scale = tl.load(weight_scales + output * GROUPS + group, is_output, 0.0)
        acc += tl.dot(a, tl.trans(b)) * a_scale[:, None] * b_scale[None, :]
    is_last = True
    if SPLITS > 1:
        acc, is_last = add_splits(acc, partial, splits_done, tile, split, SPLITS)
    if is_last:
        place = y + row[:, None] * OUTPUTS + output[None, :]
        tl.store(place, acc.to(y.dtype.element_ty), is_row[:, None] & is_output[None, :])
