"""Paged attention of chunks of query tokens in Triton, after FlashAttention-2.

A layer's cache is [2, num_blocks, block_size, num_kv_heads, head_dim]. Knows tensors only: no
batches, no models. How the work is cut is in docs/cuda.md.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.triton.online_softmax import LOG2_E, attend, register_limit


def prefill_tiles(
    query_lens: tuple[int, ...],
    seq_lens: tuple[int, ...],
    group: int,
    head_dim: int,
    dtype: torch.dtype,
) -> list[tuple[int, int]]:
    """Cut the rows of more than one query token into tiles: (row, its first token in the row).

    Those that read the most keys come first. `group` query heads share a KV head.
    """
    tokens = _tile_rows(group, dtype, head_dim) // group
    tiles = [
        (seq_len - query_len + min(first + tokens, query_len), row, first)
        for row, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True))
        if query_len > 1
        for first in range(0, query_len, tokens)
    ]
    tiles.sort(key=lambda tile: -tile[0])
    return [(row, first) for _, row, first in tiles]


def prefill(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Attend for the rows that `tiles` covers, after FlashAttention-2 (arXiv 2307.08691).

    A query meets its keys in tiles counted from the sequence's beginning, so its result does not
    depend on where a chunk begins.

    Args:
        q: [T, num_heads, head_dim].
        kv_cache: [2, num_blocks, block_size, num_kv_heads, head_dim], `q`'s dtype or float8_e4m3fn.
        block_tables: [R, width] int32; a row's columns past its last block are not read.
        cu_seqlens_q: [R + 1] int32.
        seq_lens: [R] int32.
        tiles: [N, 2] int32, from `prefill_tiles`.
        out: like `q`; the tokens of the tiles are written.
    """
    assert q.is_contiguous()
    assert kv_cache.is_contiguous()
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = kv_cache.shape[2:4]
    group = num_heads // num_kv_heads
    rows = _tile_rows(group, q.dtype, head_dim)
    k_cache, v_cache = kv_cache.unbind()
    _prefill[(len(tiles) * num_kv_heads,)](
        q, k_cache, v_cache, out, block_tables, block_tables.stride(0),
        cu_seqlens_q, seq_lens, tiles, head_dim**-0.5 * LOG2_E,
        KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        TOKENS=rows // group, M=rows, D=triton.next_power_of_2(head_dim),
        **_prefill_options(q.dtype, head_dim), **register_limit(q.dtype, kv_cache.dtype),
    )  # fmt: skip


def _prefill_options(dtype: torch.dtype, head_dim: int) -> dict[str, int]:
    """N keys in a tile; float32 keeps three 16-bit parts of each operand in registers."""
    if dtype == torch.float32:
        return {"N": 16 if head_dim > 128 else 32, "num_warps": 4, "num_stages": 2}
    return {"N": 32, "num_warps": 8, "num_stages": 2}


def _tile_rows(group: int, dtype: torch.dtype, head_dim: int) -> int:
    """Return the rows of a prefill tile: query tokens times the heads of a group."""
    rows = 16 if dtype == torch.float32 else 64 if head_dim > 128 else 128
    return max(rows, int(triton.next_power_of_2(group)))


# What changes from batch to batch must not make Triton compile anew, as a number that is 1 or a
# multiple of 16, or a pointer that is off 16 bytes, otherwise would.
@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["cu_seqlens_q", "seq_lens", "block_tables", "tiles"],
)
def _prefill(
    q, k_cache, v_cache, out, block_tables, table_stride, cu_seqlens_q, seq_lens, tiles, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """A program takes a tile of query tokens for one KV head, all heads of the group together."""
    tile = tiles + tl.program_id(0) // KV_HEADS * 2
    head = tl.program_id(0) % KV_HEADS
    row, first = tl.load(tile).to(tl.int64), tl.load(tile + 1)
    start = tl.load(cu_seqlens_q + row)
    query_len = tl.load(cu_seqlens_q + row + 1) - start
    seq_len = tl.load(seq_lens + row)
    dims = tl.arange(0, D)
    member = tl.arange(0, M)
    token = first + member // GROUP
    valid = (member < TOKENS * GROUP) & (token < query_len)
    mask = valid[:, None] & (dims < HEAD_DIM)[None, :]
    heads = ((start + token).to(tl.int64) * KV_HEADS + head) * GROUP + member % GROUP
    place = heads[:, None] * HEAD_DIM + dims[None, :]
    queries = tl.load(q + place, mask=mask, other=0.0)
    before = seq_len - query_len
    seen = tl.minimum(before + first + TOKENS, seq_len)
    seen_by_all = (before + first + 1) // N  # tiles of keys
    acc = tl.zeros([M, D], tl.float32)
    largest = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    table = block_tables + row * table_stride
    acc, largest, total = attend(
        acc, largest, total, queries, k_cache, v_cache, table, head, before + token, seq_len,
        0, seen_by_all, scale,
        MASKED=False, KV_HEADS=KV_HEADS, HEAD_DIM=HEAD_DIM, BLOCK_SIZE=BLOCK_SIZE, N=N, D=D,
    )  # fmt: skip
    acc, largest, total = attend(
        acc, largest, total, queries, k_cache, v_cache, table, head, before + token, seq_len,
        seen_by_all, tl.cdiv(seen, N), scale,
        MASKED=True, KV_HEADS=KV_HEADS, HEAD_DIM=HEAD_DIM, BLOCK_SIZE=BLOCK_SIZE, N=N, D=D,
    )  # fmt: skip
    tl.store(out + place, acc / total[:, None], mask=mask)
