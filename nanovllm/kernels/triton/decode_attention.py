"""Paged attention of rows with one query token in Triton: split KV, after FlashDecoding.

A layer's cache is [2, num_blocks, block_size, num_kv_heads, head_dim]. Knows tensors only: no
batches, no models. How the work is cut is in docs/cuda.md.
"""

import dataclasses

import torch
import triton
import triton.language as tl

from nanovllm.kernels.triton.online_softmax import LOG2_E, attend, register_limit

MAX_SPLITS = 32
"""A row's keys are read in at most this many pieces, which bounds the scratch memory."""
SPLIT_TOKENS = 256
"""The longest piece, while a row needs no more than MAX_SPLITS of them."""

_PROGRAMS = 2048
"""Most programs of a decode launch; each takes pieces until none is left."""
_PLAN_ROWS = tl.constexpr(16)
_PLAN_COLUMNS = tl.constexpr(128)
_MAX_SPLITS = tl.constexpr(MAX_SPLITS)
_SPLIT_TOKENS = tl.constexpr(SPLIT_TOKENS)


# What changes from batch to batch must not make Triton compile anew, as a number that is 1 or a
# multiple of 16, or a pointer that is off 16 bytes, otherwise would.
_jit = triton.jit(
    do_not_specialize=["num_rows", "max_splits", "table_stride"],
    do_not_specialize_on_alignment=[
        *("cu_seqlens_q", "seq_lens", "block_tables", "pieces", "num_pieces", "arrived"),
    ],
)


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """How a batch's single-token rows are cut into pieces. One plan serves all layers, in turn."""

    pieces: torch.Tensor
    """[rows * max_splits, 4] int32: row, split, seq_len, query token; longest pieces first."""
    num_pieces: torch.Tensor
    """[1] int32."""
    arrived: torch.Tensor
    """[rows, num_kv_heads] int32, splits that are done; 0 between two launches."""
    partial: torch.Tensor
    """[rows, max_splits, num_heads, head_dim] float32, each split's weighted sum of values."""
    stats: torch.Tensor
    """[rows, max_splits, num_heads, 2] float32: largest score (log2), sum of weights."""
    max_splits: int


def plan_decode(
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> DecodePlan:
    """Cut the rows of one query token into pieces, on the device.

    Other rows, and those of length 0, get none. A row's pieces depend on its own length only.

    Args:
        cu_seqlens_q: [R + 1] int32.
        seq_lens: [R] int32, none above `max_seq_len`.
        max_seq_len: with R, all that the launches depend on.
    """
    rows, device = len(seq_lens), seq_lens.device
    max_splits = min(MAX_SPLITS, triton.cdiv(max_seq_len, SPLIT_TOKENS))
    splits = (rows, max_splits, num_heads)
    plan = DecodePlan(
        pieces=torch.empty(rows * max_splits, 4, dtype=torch.int32, device=device),
        num_pieces=torch.empty(1, dtype=torch.int32, device=device),
        arrived=torch.empty(rows, num_kv_heads, dtype=torch.int32, device=device),
        partial=torch.empty(*splits, head_dim, dtype=torch.float32, device=device),
        stats=torch.empty(*splits, 2, dtype=torch.float32, device=device),
        max_splits=max_splits,
    )
    _plan_decode[(triton.cdiv(rows, _PLAN_ROWS.value),)](
        cu_seqlens_q, seq_lens, plan.pieces, plan.num_pieces, plan.arrived, rows,
        KV_HEADS=num_kv_heads,
    )  # fmt: skip
    return plan


def decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    plan: DecodePlan,
    out: torch.Tensor,
) -> None:
    """Attend for the rows of `plan`, after FlashDecoding (Dao et al., 2023).

    The last program of a row to finish merges its splits, in their order: no second launch, and
    the same bits whoever is last.

    Args:
        q: [T, num_heads, head_dim].
        kv_cache: [2, num_blocks, block_size, num_kv_heads, head_dim], `q`'s dtype or float8_e4m3fn.
        block_tables: [R, width] int32; a row's columns past its last block are not read.
        out: like `q`; the tokens of the plan's rows are written.
    """
    assert q.is_contiguous()
    assert kv_cache.is_contiguous()
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = kv_cache.shape[2:4]
    group = num_heads // num_kv_heads
    k_cache, v_cache = kv_cache.unbind()
    grid = (min(len(plan.pieces) * num_kv_heads, _PROGRAMS),)
    _decode[grid](
        q, k_cache, v_cache, out, block_tables, block_tables.stride(0),
        plan.pieces, plan.num_pieces, plan.arrived, plan.partial, plan.stats, plan.max_splits,
        head_dim**-0.5 * LOG2_E,
        KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        M=max(16, triton.next_power_of_2(group)), D=triton.next_power_of_2(head_dim),
        **_decode_options(q.dtype, head_dim), **register_limit(q.dtype, kv_cache.dtype),
    )  # fmt: skip


def _decode_options(dtype: torch.dtype, head_dim: int) -> dict[str, int]:
    """N keys in a tile: at most 32 KiB of keys and values, two such tiles on their way."""
    row_bytes = triton.next_power_of_2(head_dim) * dtype.itemsize
    return {"N": min(64, 16384 // row_bytes), "num_warps": 4, "num_stages": 3}


@triton.jit
def _num_splits(seq_len):
    return tl.minimum(tl.cdiv(seq_len, _SPLIT_TOKENS), _MAX_SPLITS)


@triton.jit
def _row_of_plan(cu_seqlens_q, seq_lens, row, num_rows):
    """Return a row's query token, length, number of splits (0: not ours) and a piece's length."""
    inside = row < num_rows
    token = tl.load(cu_seqlens_q + row, mask=inside, other=0)
    stop = tl.load(cu_seqlens_q + row + 1, mask=inside, other=0)
    seq_len = tl.load(seq_lens + row, mask=inside, other=0)
    splits = tl.where(stop - token == 1, _num_splits(seq_len), 0)
    return token, seq_len, splits, tl.cdiv(seq_len, tl.maximum(splits, 1))


@_jit
def _plan_decode(
    cu_seqlens_q, seq_lens, pieces, num_pieces, arrived, num_rows, KV_HEADS: tl.constexpr
):
    """Place the pieces of 16 rows behind those of every row with longer ones."""
    row = tl.program_id(0) * _PLAN_ROWS + tl.arange(0, _PLAN_ROWS)
    token, seq_len, splits, length = _row_of_plan(cu_seqlens_q, seq_lens, row, num_rows)
    before = tl.zeros([_PLAN_ROWS], tl.int32)
    total = 0
    for start in range(0, num_rows, _PLAN_COLUMNS):
        other = start + tl.arange(0, _PLAN_COLUMNS)
        _, _, others, other_length = _row_of_plan(cu_seqlens_q, seq_lens, other, num_rows)
        longer = other_length[None, :] > length[:, None]
        earlier = (other_length[None, :] == length[:, None]) & (other[None, :] < row[:, None])
        before += tl.sum(tl.where(longer | earlier, others[None, :], 0), axis=1)
        total += tl.sum(others)
    split = tl.arange(0, _MAX_SPLITS)[None, :]
    place = pieces + (before[:, None] + split) * 4
    mask = split < splits[:, None]
    tl.store(place, row[:, None], mask=mask)
    tl.store(place + 1, split, mask=mask)
    tl.store(place + 2, seq_len[:, None], mask=mask)
    tl.store(place + 3, token[:, None], mask=mask)
    for head in range(KV_HEADS):
        tl.store(arrived + row * KV_HEADS + head, 0, mask=row < num_rows)
    tl.store(num_pieces, total, mask=tl.program_id(0) == 0)


@_jit
def _decode(
    q, k_cache, v_cache, out, block_tables, table_stride,
    pieces, num_pieces, arrived, partial, stats, max_splits, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """A program takes a piece of a row for one KV head; the tile's rows are its query heads."""
    dims = tl.arange(0, D)
    member = tl.arange(0, M)
    mask = (member < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    for index in range(tl.program_id(0), tl.load(num_pieces) * KV_HEADS, tl.num_programs(0)):
        piece = pieces + index // KV_HEADS * 4
        head = index % KV_HEADS
        row, split = tl.load(piece).to(tl.int64), tl.load(piece + 1)
        seq_len, token = tl.load(piece + 2), tl.load(piece + 3).to(tl.int64)
        tiles, splits = tl.cdiv(seq_len, N), _num_splits(seq_len)
        heads = (token * KV_HEADS + head) * GROUP
        place = (heads + member)[:, None] * HEAD_DIM + dims[None, :]
        queries = tl.load(q + place, mask=mask, other=0.0)
        acc, largest, total = attend(
            tl.zeros([M, D], tl.float32), tl.full([M], float("-inf"), tl.float32),
            tl.zeros([M], tl.float32), queries, k_cache, v_cache,
            block_tables + row * table_stride, head, tl.full([M], 0, tl.int32) + seq_len - 1,
            seq_len, tiles * split // splits, tiles * (split + 1) // splits, scale,
            MASKED=True, KV_HEADS=KV_HEADS, HEAD_DIM=HEAD_DIM, BLOCK_SIZE=BLOCK_SIZE, N=N, D=D,
        )  # fmt: skip
        if splits == 1:
            tl.store(out + place, acc / total[:, None], mask=mask)
        else:
            scratch = ((row * max_splits + split) * KV_HEADS + head) * GROUP + member
            tl.store(partial + scratch[:, None] * HEAD_DIM + dims[None, :], acc, mask=mask)
            tl.store(stats + scratch * 2, largest, mask=member < GROUP)
            tl.store(stats + scratch * 2 + 1, total, mask=member < GROUP)
            tl.debug_barrier()  # the whole program's stores come before its arrival
            done = tl.atomic_add(arrived + row * KV_HEADS + head, 1, sem="acq_rel")
            if done == splits - 1:
                _merge(
                    out + heads * HEAD_DIM, partial, stats,
                    (row * max_splits * KV_HEADS + head) * GROUP, splits,
                    KV_HEADS=KV_HEADS, GROUP=GROUP, HEAD_DIM=HEAD_DIM, D=D,
                )  # fmt: skip
                tl.store(arrived + row * KV_HEADS + head, 0)


@triton.jit
def _merge(
    out, partial, stats, first, splits,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Sum a row's splits for one KV head. Always as MAX_SPLITS: the order of the sum is fixed."""
    dims = tl.arange(0, D)
    split = tl.arange(0, _MAX_SPLITS)
    valid = split < splits
    for member in range(GROUP):
        # ".cg": from the L2, where the other programs' stores are; this SM's L1 may hold older.
        scratch = first + member + split * KV_HEADS * GROUP
        largest = tl.load(stats + scratch * 2, valid, float("-inf"), cache_modifier=".cg")
        total = tl.load(stats + scratch * 2 + 1, valid, 0.0, cache_modifier=".cg")
        values = tl.load(
            partial + scratch[:, None] * HEAD_DIM + dims[None, :],
            mask=valid[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        weights = tl.exp2(largest - tl.max(largest, 0))
        value = tl.sum(weights[:, None] * values, 0) / tl.sum(weights * total, 0)
        tl.store(out + member * HEAD_DIM + dims, value, mask=dims < HEAD_DIM)
