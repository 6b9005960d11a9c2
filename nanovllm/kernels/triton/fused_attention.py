"""Decode attention in one Triton launch from the projections of q, k and v: norm, rotation, the
store into the cache, and the attention of a few rows of one token.

Rows may be tokens of one sequence. Its new keys and values are then read from the projections,
because nothing says when another program has stored them. The cache is that of `decode_attention`.
"""

import dataclasses

import torch
import triton
import triton.language as tl

from nanovllm.kernels.triton.fused_layer import (
    MAX_ROWS,
    launch_options,
    let_next_begin,
    wait_for_previous,
)
from nanovllm.kernels.triton.online_softmax import LOG2_E, MAX_SPLITS, attend, block_ids, merge

_PROGRAMS = 256
"""Programs of a launch, at least, unless the rows have fewer splits."""
_MAX_SPLITS = tl.constexpr(MAX_SPLITS)


@dataclasses.dataclass(frozen=True)
class Scratch:
    """Memory for the splits of a batch's rows. The layers share it: they run one after another."""

    splits_done: torch.Tensor
    """[MAX_ROWS, num_kv_heads] int32, the finished splits of a row; 0 between two launches."""
    partial_out: torch.Tensor
    """[R, MAX_SPLITS, num_heads, head_dim] float32, the weighted sum of values of each split."""
    partial_stats: torch.Tensor
    """[R, MAX_SPLITS, num_heads, 2] float32: maximum score (log2), and sum of weights."""


def make_scratch(splits_done: torch.Tensor, rows: int, num_heads: int, head_dim: int) -> Scratch:
    """Return scratch memory for `rows` rows; `splits_done` is zeroed memory that stays."""
    per_head = (rows, MAX_SPLITS, num_heads)
    return Scratch(
        splits_done,
        splits_done.new_empty(*per_head, head_dim, dtype=torch.float32),
        splits_done.new_empty(*per_head, 2, dtype=torch.float32),
    )


def attend_rows(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_tables: torch.Tensor,
    kv_cache: torch.Tensor,
    num_heads: int,
    scratch: Scratch,
    *,
    chained: bool,
) -> torch.Tensor:
    """Do what `ops.store` does, then attend as `decode_attention.decode` does.

    A row sees the keys in the cache and those of the rows that share its sequence, up to its own
    position. These rows must have consecutive positions. A row's splits follow from the number of
    its keys in the cache, never from the batch.

    Args:
        qkv: [R, (heads + 2 kv_heads) * dim], R at most MAX_ROWS.
        q_weight, k_weight, eps, cos_sin, positions, slot_mapping: see `ops.store`.
        block_tables: [R, width] int32. Columns past a row's last block are not read.
        kv_cache: [2, num_blocks, block_size, num_kv_heads, head_dim] of `qkv`'s dtype.
        chained: see `fused_layer.launch_options`.

    Returns:
        [R, num_heads, head_dim].
    """
    assert qkv.is_contiguous()
    assert kv_cache.is_contiguous()
    rows = len(qkv)
    block_size, num_kv_heads, head_dim = kv_cache.shape[2:]
    group = num_heads // num_kv_heads
    k_cache, v_cache = kv_cache.unbind()
    out = qkv.new_empty(rows, num_heads, head_dim)
    width = triton.next_power_of_2(head_dim)
    pairs = rows * num_kv_heads
    _attend_rows[(pairs, min(triton.cdiv(_PROGRAMS, pairs), MAX_SPLITS))](
        qkv, q_weight, k_weight, eps, cos_sin, positions, slot_mapping,
        block_tables, block_tables.stride(0), k_cache, v_cache, out,
        scratch.splits_done, scratch.partial_out, scratch.partial_stats, rows,
        head_dim**-0.5 * LOG2_E,
        KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        ROWS=MAX_ROWS, M=max(16, triton.next_power_of_2(group)), D=width,
        N=min(64, 16384 // (width * qkv.itemsize)), num_warps=2 * qkv.itemsize, num_stages=3,
        **launch_options(chained),
    )  # fmt: skip
    return out


@triton.jit(
    do_not_specialize=["rows", "table_stride"],
    do_not_specialize_on_alignment=["positions", "slot_mapping", "block_tables"],
)
def _attend_rows(
    qkv, q_weight, k_weight, eps, cos_sin, positions, slot_mapping, block_tables, table_stride,
    k_cache, v_cache, out, splits_done, partial_out, partial_stats, rows, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, M: tl.constexpr, D: tl.constexpr, N: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Process splits of one row for one KV head. The M rows of a tile are its query heads."""
    let_next_begin(CHAINED)
    wait_for_previous(CHAINED)
    row, head = (tl.program_id(0) // KV_HEADS).to(tl.int64), tl.program_id(0) % KV_HEADS
    table = block_tables + row * table_stride
    new = _new_keys(row, positions, slot_mapping, table, rows, BLOCK_SIZE, ROWS)
    stored = new[4]
    tiles = tl.cdiv(stored, N)
    count = tl.minimum(tl.maximum(tiles, 1), _MAX_SPLITS)
    if tl.program_id(1) >= count:
        return

    member = tl.arange(0, M)
    dims = tl.arange(0, D)
    mask = (member < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    first_head = (row * KV_HEADS + head) * GROUP
    token = qkv + row * (GROUP + 2) * KV_HEADS * HEAD_DIM
    queries = _norm_and_rotate(
        token + (head * GROUP + member)[:, None] * HEAD_DIM, q_weight, eps,
        cos_sin + tl.load(positions + row) * HEAD_DIM, (member < GROUP)[:, None], HEAD_DIM, D,
    )  # fmt: skip
    for split in range(tl.program_id(1), count, tl.num_programs(1)):
        first, last = tiles * split // count, tiles * (split + 1) // count
        block = block_ids(table, first, last, stored, BLOCK_SIZE, N)
        acc, score_max, weight_sum = attend(
            tl.zeros([M, D], tl.float32), tl.full([M], float("-inf"), tl.float32),
            tl.zeros([M], tl.float32), queries, k_cache, v_cache, table, block, head,
            tl.full([M], 0, tl.int32) + stored - 1, stored, first, last, scale,
            MASKED=True, KV_HEADS=KV_HEADS, HEAD_DIM=HEAD_DIM, BLOCK_SIZE=BLOCK_SIZE, N=N, D=D,
        )  # fmt: skip
        if split == count - 1:
            acc, score_max, weight_sum = _attend_new_keys(
                acc, score_max, weight_sum, queries, qkv, k_weight, eps, cos_sin, new, row, head,
                k_cache, v_cache, scale, KV_HEADS, GROUP, HEAD_DIM, D,
            )  # fmt: skip
        if count == 1:
            place = (first_head + member)[:, None] * HEAD_DIM + dims[None, :]
            tl.store(out + place, acc / weight_sum[:, None], mask=mask)
        else:
            scratch = ((row * _MAX_SPLITS + split) * KV_HEADS + head) * GROUP + member
            tl.store(partial_out + scratch[:, None] * HEAD_DIM + dims[None, :], acc, mask=mask)
            tl.store(partial_stats + scratch * 2, score_max, mask=member < GROUP)
            tl.store(partial_stats + scratch * 2 + 1, weight_sum, mask=member < GROUP)
            tl.debug_barrier()  # all threads must have stored before the split counts as done
            done = tl.atomic_add(splits_done + row * KV_HEADS + head, 1, sem="acq_rel")
            if done == count - 1:
                merge(
                    out + first_head * HEAD_DIM, partial_out, partial_stats,
                    (row * _MAX_SPLITS * KV_HEADS + head) * GROUP, count,
                    KV_HEADS=KV_HEADS, GROUP=GROUP, HEAD_DIM=HEAD_DIM, D=D,
                )  # fmt: skip
                tl.store(splits_done + row * KV_HEADS + head, 0)


@triton.jit
def _new_keys(
    row, positions, slot_mapping, table, rows, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr
):
    """Return which rows of the batch have keys that `row` sees.

    They are the tokens of its sequence up to its own position. A slot that its block table leads to
    tells: a block that takes a new token is of one sequence only.

    Returns:
        The rows [ROWS], their positions [ROWS], slots [ROWS], whether they are seen [ROWS], and the
        number of keys in the cache, those before the first of them.
    """
    other = tl.arange(0, ROWS)
    position = tl.load(positions + row)
    theirs = tl.load(positions + other, other < rows, 0)
    slot = tl.load(slot_mapping + other, other < rows, -1)
    earlier = (other < rows) & (theirs <= position)
    block = tl.load(table + theirs // BLOCK_SIZE, earlier, 0).to(tl.int64)
    seen = earlier & (block * BLOCK_SIZE + theirs % BLOCK_SIZE == slot)
    seen = seen | (other == row)
    stored = tl.min(tl.where(seen, theirs, position)).to(tl.int32)
    return other, theirs, slot, seen, stored


@triton.jit
def _norm_and_rotate(heads, weight, eps, angles, inside, HEAD_DIM: tl.constexpr, D: tl.constexpr):
    """Return heads [X, D], normalised if there is a `weight`, and rotated.

    Args:
        heads: [X, 1] pointers to heads.
        angles: pointers to their cosines, then sines; [X, 1], or one for all.
        inside: [X, 1], the heads to load; the others are 0.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    dims = tl.arange(0, D)[None, :]
    is_first = dims < HALF
    partner = tl.where(is_first, dims + HALF, dims - HALF)
    inside = inside & (dims < HEAD_DIM)
    x, y = tl.load(heads + dims, inside, 0.0), tl.load(heads + partner, inside, 0.0)
    dtype = x.dtype
    x, y = x.to(tl.float32), y.to(tl.float32)
    if weight is not None:
        scale = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / HEAD_DIM + eps)
        x_factor = tl.load(weight + dims, dims < HEAD_DIM, 0.0).to(tl.float32)
        y_factor = tl.load(weight + partner, dims < HEAD_DIM, 0.0).to(tl.float32)
        x = ((x * scale).to(dtype).to(tl.float32) * x_factor).to(dtype).to(tl.float32)
        y = ((y * scale).to(dtype).to(tl.float32) * y_factor).to(dtype).to(tl.float32)
    angle = angles + tl.where(is_first, dims, dims - HALF)
    cos = tl.load(angle, dims < HEAD_DIM, 0.0)
    sin = tl.load(angle + HALF, dims < HEAD_DIM, 0.0)
    return (x * cos + tl.where(is_first, -y, y) * sin).to(dtype)


@triton.jit
def _attend_new_keys(
    acc, score_max, weight_sum, queries, qkv, k_weight, eps, cos_sin, new, row, head,
    k_cache, v_cache, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Process the keys of `_new_keys`, as `attend` does those in the cache. Store the row's own."""
    other, positions, slots, seen, _ = new
    dims = tl.arange(0, D)[None, :]
    inside = seen[:, None] & (dims < HEAD_DIM)
    tokens = qkv + other[:, None] * (GROUP + 2) * KV_HEADS * HEAD_DIM
    keys = tokens + (GROUP * KV_HEADS + head) * HEAD_DIM
    angles = cos_sin + positions[:, None] * HEAD_DIM
    k = _norm_and_rotate(keys, k_weight, eps, angles, seen[:, None], HEAD_DIM, D)
    v = tl.load(keys + KV_HEADS * HEAD_DIM + dims, inside, 0.0)
    place = (slots[:, None] * KV_HEADS + head) * HEAD_DIM + dims
    is_own = inside & ((other == row) & (slots >= 0))[:, None]
    tl.store(k_cache + place, k, is_own)
    tl.store(v_cache + place, v, is_own)
    scores = tl.dot(queries, tl.trans(k), input_precision="tf32x3")
    scores = tl.where(seen[None, :], scores, float("-inf"))
    new_max = tl.maximum(score_max, tl.max(scores, 1) * scale)
    weights = tl.exp2(tl.fma(scores, scale, -new_max[:, None]))
    shrink = tl.exp2(score_max - new_max)
    weight_sum = tl.fma(weight_sum, shrink, tl.sum(weights, 1))
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="tf32x3")
    return acc, new_max, weight_sum
