"""The Triton kernels of `prefill_attention`. Their launches get what its plan has computed.

docs/cuda.md says how the work is divided.
"""

import triton
import triton.language as tl

from nanovllm.kernels.triton.online_softmax import (
    NO_SCORE,
    attend,
    block_ids,
    load_queries,
    merge,
    store_result,
    store_split,
)

MERGED_TOKENS = tl.constexpr(8)
"""Maximum query tokens of an entry of `PrefillLaunch.merges`. Each has separate programs."""


# Values that change from batch to batch must not cause a recompilation. By default Triton compiles
# another kernel for an integer that is 1 or a multiple of 16, and for a pointer that is not aligned
# to 16 bytes.
@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["cu_seqlens_q", "seq_lens", "block_tables", "tiles"],
)
def prefill_tile(
    q, k_cache, v_cache, out, sinks, block_tables, table_stride, cu_seqlens_q, seq_lens, tiles,
    partial_out, partial_stats, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    VALUE_DIM: tl.constexpr, TOKENS: tl.constexpr, SPLIT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Process one query tile for one KV head: TOKENS query tokens times GROUP query heads.

    The M - TOKENS * GROUP rows at the end of the tile are padding.
    SPLIT says whether any row of the launch is split: without splits, fewer registers are needed.
    """
    tile = tiles + tl.program_id(0) // KV_HEADS * 5
    head = tl.program_id(0) % KV_HEADS
    row = tl.load(tile).to(tl.int64)
    first = tl.load(tile + 1)
    start = tl.load(cu_seqlens_q + row)
    query_len = tl.load(cu_seqlens_q + row + 1) - start
    seq_len = tl.load(seq_lens + row)
    OUT_DIM: tl.constexpr = HEAD_DIM if VALUE_DIM is None else VALUE_DIM
    member = tl.arange(0, M)
    token = first + member // GROUP
    valid = (member < TOKENS * GROUP) & (token < query_len)
    heads = ((start + token).to(tl.int64) * KV_HEADS + head) * GROUP + member % GROUP
    queries, rest, place, mask = load_queries(q, heads, valid, HEAD_DIM, VALUE_DIM, D)
    num_computed = seq_len - query_len
    split = 0
    splits = 1
    if SPLIT:
        split = tl.load(tile + 2)
        splits = tl.load(tile + 3)
    key_tiles = _key_tiles(
        num_computed + first, tl.minimum(num_computed + first + TOKENS, seq_len), split, splits,
        WINDOW, SPLIT, N,
    )  # fmt: skip
    acc, score_max, weight_sum = _attend_tiles(
        queries, rest, k_cache, v_cache, block_tables + row * table_stride, head,
        num_computed + token, seq_len, key_tiles, scale,
        KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, WINDOW, SOFTCAP, VALUE_DIM, M, N, D,
    )  # fmt: skip
    if not SPLIT or splits == 1:
        store_result(
            out + place, acc, score_max, weight_sum, sinks, head * GROUP + member % GROUP,
            valid, mask,
        )  # fmt: skip
    else:
        scratch = tl.load(tile + 4) + member // GROUP * splits + split
        scratch = (scratch * KV_HEADS + head) * GROUP + member % GROUP
        store_split(
            partial_out, partial_stats, scratch, acc, score_max, weight_sum, valid, mask,
            OUT_DIM, D,
        )  # fmt: skip


@triton.jit
def _attend_tiles(
    queries, rest, k_cache, v_cache, table, head, position, seq_len, key_tiles, scale,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    VALUE_DIM: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Attend with the queries [M, D] to `key_tiles`, which `_key_tiles` returned; see `attend`."""
    first_key = key_tiles[0]
    bounds = key_tiles[1:]
    acc = tl.zeros([M, D], tl.float32)
    score_max = tl.full([M], NO_SCORE if WINDOW is not None else float("-inf"), tl.float32)
    weight_sum = tl.zeros([M], tl.float32)
    for part in tl.static_range(1 if WINDOW is None else 0, 3):
        first = bounds[part]
        stop = bounds[part + 1]
        acc, score_max, weight_sum = attend(
            acc, score_max, weight_sum, queries, rest, k_cache, v_cache, table,
            block_ids(table, first, stop, seq_len, BLOCK_SIZE, N, first_key, WINDOW), head,
            position, first_key, seq_len, first, stop, scale,
            KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, WINDOW, SOFTCAP, VALUE_DIM, N, D,
            MASKED=part != 1,
        )  # fmt: skip
    return acc, score_max, weight_sum


@triton.jit
def _key_tiles(
    position, num_keys, split, splits,
    WINDOW: tl.constexpr, SPLIT: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Return the first key that the query tile sees, and the key tiles of a split of its keys.

    They are [first, begin), which only a WINDOW leaves, [begin, end), and [end, last). Every query
    sees every key of [begin, end). These are divided among the splits; so without a WINDOW each
    has some. The first split has those before them as well, and the last one those after.

    Args:
        position: of the first query.
        num_keys: keys up to the last query.
    """
    first_key = 0
    first = 0
    begin = 0
    end = (position + 1) // N
    last = tl.cdiv(num_keys, N)
    if WINDOW is not None:
        first_key = tl.maximum(position - WINDOW + 1, 0)
        first = first_key // N
        begin = tl.minimum(tl.cdiv(tl.maximum(num_keys - WINDOW, 0), N), end)
    if SPLIT:
        tiles = end - begin
        unsplit = begin
        begin = unsplit + tiles * split // splits
        end = unsplit + tiles * (split + 1) // splits
        last = tl.where(split == splits - 1, last, end)
        if WINDOW is not None:
            first = tl.where(split == 0, first, begin)
    return first_key, first, begin, end, last


@triton.jit(do_not_specialize_on_alignment=["merges"])
def merge_prefill(
    out, sinks, partial_out, partial_stats, merges,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one query token for one KV head. An entry has MERGED_TOKENS programs."""
    head = tl.program_id(0) % KV_HEADS
    index = tl.program_id(0) // KV_HEADS
    entry = merges + index // MERGED_TOKENS * 4
    token = index % MERGED_TOKENS
    splits = tl.load(entry + 2)
    if token < tl.load(entry + 1):
        place = ((tl.load(entry) + token).to(tl.int64) * KV_HEADS + head) * GROUP
        partial = ((tl.load(entry + 3) + token * splits) * KV_HEADS + head) * GROUP
        merge(
            out + place * HEAD_DIM, partial_out, partial_stats, partial, splits, sinks, head,
            KV_HEADS=KV_HEADS, GROUP=GROUP, HEAD_DIM=HEAD_DIM, D=D,
        )  # fmt: skip
