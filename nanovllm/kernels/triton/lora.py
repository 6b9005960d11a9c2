"""The adapters' part of a layer's outputs in Triton: two launches, whatever the adapters.

Grids depend only on shapes and the host never waits for the device, so a CUDA graph can contain
every call.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.adapters import AdapterRows, AdapterTable

_ROWS = 16  # tokens of a tile, for any number of tokens
_INPUTS_OF_A_SPLIT = 1024
_MAX_SPLITS = 4  # programs that share the inputs of an `a x`. `_expand` adds up their sums in order


def add_lora(y: torch.Tensor, x: torch.Tensor, rows: AdapterRows, table: AdapterTable) -> None:
    """Do what `kernels.adapters.add_lora` says. `y` is contiguous.

    The bits of a row depend on its numbers, its adapter, the shapes of `table` but the number of
    slots, and the GPU. They do not depend on the number of rows, nor on the other rows and their
    adapters: a program computes 16 rows for one adapter, and keeps those that have it.
    """
    assert y.is_contiguous()
    x = x.contiguous()
    tokens, inputs = x.shape
    outputs = y.shape[1]
    slots, slices = table.ranks.shape
    if not tokens:
        return
    splits = min(triton.cdiv(inputs, _INPUTS_OF_A_SPLIT), _MAX_SPLITS)
    sums = table.a.shape[1]
    partial = x.new_empty(splits, tokens, sums, dtype=torch.float32)
    tiles = triton.cdiv(tokens, _ROWS) * slots
    rank_blocks = triton.cdiv(table.max_rank, _ROWS)
    common = {"SLICES": slices, "RANK": table.max_rank, "R": _ROWS, "M": _ROWS}
    _shrink[(tiles, slices * rank_blocks, splits)](
        x, table.a, table.ranks, rows.slots, partial, tokens, slots,
        INPUTS=inputs, K=512 // x.itemsize, **common, num_warps=4, num_stages=3,
    )  # fmt: skip
    _expand[(tiles, triton.cdiv(outputs, 64) + slices - 1)](
        y, table.b, table.ranks, table.scales, table.ends, rows.slots, partial, tokens, slots,
        OUTPUTS=outputs, SPLITS=splits, N=64, **common, num_warps=4,
    )  # fmt: skip


@triton.jit
def _tile(slots, tokens, num_slots, M: tl.constexpr):
    """Return the slot of this program, its rows, and which of them have that slot."""
    slot = tl.program_id(0) % num_slots
    row = tl.program_id(0) // num_slots * M + tl.arange(0, M)
    is_ours = tl.load(slots + row, row < tokens, -1) == slot
    return slot, row, is_ours


@triton.jit(do_not_specialize=["tokens", "num_slots"])
def _shrink(
    x, a, ranks, slots, partial, tokens, num_slots,
    INPUTS: tl.constexpr, SLICES: tl.constexpr, RANK: tl.constexpr,
    R: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Compute R sums of `a x` for the rows of a tile with one slot, over a part of the inputs."""
    RANK_BLOCKS: tl.constexpr = (RANK + R - 1) // R
    slot, row, is_ours = _tile(slots, tokens, num_slots, M)
    slice_ = tl.program_id(1) // RANK_BLOCKS
    first = tl.program_id(1) % RANK_BLOCKS * R
    rank = tl.load(ranks + slot * SLICES + slice_)
    if (first < rank) & (tl.max(is_ours.to(tl.int32), 0) > 0):
        number = first + tl.arange(0, R)
        is_number = number < rank
        STEPS: tl.constexpr = (INPUTS + K - 1) // K
        split = tl.program_id(2)
        splits = tl.num_programs(2)
        place = row.to(tl.int64)
        source = a + (slot.to(tl.int64) * SLICES * RANK + slice_ * RANK + number) * INPUTS
        acc = tl.zeros([M, R], tl.float32)
        for step in range(STEPS * split // splits, STEPS * (split + 1) // splits):
            column = step * K + tl.arange(0, K)
            is_input = (column < INPUTS)[None, :]
            left = tl.load(x + place[:, None] * INPUTS + column, is_ours[:, None] & is_input, 0.0)
            right = tl.load(source[:, None] + column, is_number[:, None] & is_input, 0.0)
            acc = tl.dot(left, tl.trans(right), acc, input_precision="ieee")
        target = partial + ((split * tokens + place) * SLICES + slice_)[:, None] * RANK + number
        tl.store(target, acc, is_ours[:, None] & is_number[None, :])


@triton.jit
def _find_slice(ends, block, SLICES: tl.constexpr, N: tl.constexpr):
    """Return the slice of block `block` of outputs, the block's first column, and the slice's end.

    A block lies within a slice. Behind the last one, the column is not below the end.
    """
    slice_ = tl.zeros([], tl.int32)
    column = tl.zeros([], tl.int32)
    end = tl.zeros([], tl.int32)
    before = tl.zeros([], tl.int32)
    start = tl.zeros([], tl.int32)
    for index in tl.static_range(SLICES):
        stop = tl.load(ends + index)
        if block >= before:
            slice_ = tl.full([], index, tl.int32)
            column = start + (block - before) * N
            end = stop
        before += tl.cdiv(stop - start, N)
        start = stop
    return slice_, column, end


@triton.jit(do_not_specialize=["tokens", "num_slots"])
def _expand(
    y, b, ranks, scales, ends, slots, partial, tokens, num_slots,
    OUTPUTS: tl.constexpr, SLICES: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr,
    R: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Add the adapter's part to N outputs of the rows of a tile with one slot."""
    slot, row, is_ours = _tile(slots, tokens, num_slots, M)
    slice_, first, end = _find_slice(ends, tl.program_id(1), SLICES, N)
    rank = tl.load(ranks + slot * SLICES + slice_)
    if (first < end) & (rank > 0) & (tl.max(is_ours.to(tl.int32), 0) > 0):
        column = first + tl.arange(0, N)
        is_column = column < end
        place = row.to(tl.int64)
        acc = tl.zeros([M, N], tl.float32)
        for start in range(0, rank, R):
            number = start + tl.arange(0, R)
            is_number = number < rank
            total = tl.zeros([M, R], tl.float32)
            for split in tl.static_range(SPLITS):
                source = (split * tokens + place) * SLICES + slice_
                inside = is_ours[:, None] & is_number[None, :]
                total += tl.load(partial + source[:, None] * RANK + number[None, :], inside, 0.0)
            source = b + (slot.to(tl.int64) * RANK + number[:, None]) * OUTPUTS + column[None, :]
            right = tl.load(source, is_number[:, None] & is_column[None, :], 0.0).to(tl.float32)
            acc = tl.dot(total, right, acc, input_precision="ieee")
        target = y + place[:, None] * OUTPUTS + column[None, :]
        inside = is_ours[:, None] & is_column[None, :]
        added = acc * tl.load(scales + slot * SLICES + slice_)
        old = tl.load(target, inside, 0.0).to(tl.float32)
        tl.store(target, (old + added).to(y.dtype.element_ty), inside)
