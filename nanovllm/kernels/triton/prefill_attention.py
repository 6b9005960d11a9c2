"""Paged attention for rows with several query tokens, in Triton, as in FlashAttention-2.

The KV cache of a layer is [2, num_blocks, block_size, num_kv_heads, head_dim]. Knows tensors only:
no batches, no models. docs/cuda.md says how the sizes below were chosen.
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
    """Return the query tiles of the rows with several query tokens, those with most keys first.

    A tile is (row, offset of its first token in the row's query tokens). `group` query heads share
    a KV head.
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
    """Compute attention for the rows in `tiles`, as in FlashAttention-2 (arXiv 2307.08691).

    Tiles of keys are counted from the start of the sequence, so the result for a query token does
    not depend on where its chunk starts.

    Args:
        q: [T, num_heads, head_dim].
        kv_cache: [2, num_blocks, block_size, num_kv_heads, head_dim], `q`'s dtype or float8_e4m3fn.
        block_tables: [R, width] int32. Columns past a row's last block are not read.
        cu_seqlens_q: [R + 1] int32.
        seq_lens: [R] int32.
        tiles: [N, 2] int32, from `prefill_tiles`.
        out: like `q`. Only the tokens of the tiles are written.
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
    """Return the launch options. N is the number of keys in a tile.

    float32 takes smaller tiles: `tf32x3` keeps each operand in registers in several parts.
    """
    if dtype == torch.float32:
        return {"N": 16 if head_dim > 128 else 32, "num_warps": 4, "num_stages": 2}
    return {"N": 32, "num_warps": 8, "num_stages": 2}


def _tile_rows(group: int, dtype: torch.dtype, head_dim: int) -> int:
    """Return the rows of a query tile: query tokens times the query heads of a group."""
    rows = 16 if dtype == torch.float32 else 64 if head_dim > 128 else 128
    return max(rows, int(triton.next_power_of_2(group)))


# Values that change from batch to batch must not cause a recompilation. By default Triton compiles
# another kernel for an integer that is 1 or a multiple of 16, and for a pointer that is not aligned
# to 16 bytes.
@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["cu_seqlens_q", "seq_lens", "block_tables", "tiles"],
)
def _prefill(
    q, k_cache, v_cache, out, block_tables, table_stride, cu_seqlens_q, seq_lens, tiles, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Process one query tile for one KV head: TOKENS query tokens times GROUP query heads.

    The M - TOKENS * GROUP rows at the end of the tile are padding.
    """
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
    num_computed = seq_len - query_len
    num_keys = tl.minimum(num_computed + first + TOKENS, seq_len)
    # Every query of the tile sees every key of these key tiles.
    unmasked_tiles = (num_computed + first + 1) // N
    acc = tl.zeros([M, D], tl.float32)
    score_max = tl.full([M], float("-inf"), tl.float32)
    weight_sum = tl.zeros([M], tl.float32)
    table = block_tables + row * table_stride
    acc, score_max, weight_sum = attend(
        acc, score_max, weight_sum, queries, k_cache, v_cache, table, head, num_computed + token,
        seq_len, 0, unmasked_tiles, scale,
        MASKED=False, KV_HEADS=KV_HEADS, HEAD_DIM=HEAD_DIM, BLOCK_SIZE=BLOCK_SIZE, N=N, D=D,
    )  # fmt: skip
    acc, score_max, weight_sum = attend(
        acc, score_max, weight_sum, queries, k_cache, v_cache, table, head, num_computed + token,
        seq_len, unmasked_tiles, tl.cdiv(num_keys, N), scale,
        MASKED=True, KV_HEADS=KV_HEADS, HEAD_DIM=HEAD_DIM, BLOCK_SIZE=BLOCK_SIZE, N=N, D=D,
    )  # fmt: skip
    tl.store(out + place, acc / weight_sum[:, None], mask=mask)
