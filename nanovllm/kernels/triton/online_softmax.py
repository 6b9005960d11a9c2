"""The loop that both attention kernels share: a tile of queries meets tiles of paged keys.

A layer's cache is [2, num_blocks, block_size, num_kv_heads, head_dim]. Knows nothing of batches.
"""

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


def register_limit(dtype: torch.dtype, kv_dtype: torch.dtype) -> dict[str, int]:
    """Left alone, ptxas takes what lets one program more run beside the others, and spills a few of
    what widening a narrow cache needs.
    """
    return {"maxnreg": 192} if dtype.itemsize == 2 and kv_dtype != dtype else {}


@triton.jit
def _page(table, tile, last, seq_len, BLOCK_SIZE: tl.constexpr, N: tl.constexpr):
    """Return the block id of a tile of keys, or of each of its keys where it spans blocks."""
    if BLOCK_SIZE % N == 0:
        page = tl.load(table + tile * N // BLOCK_SIZE, mask=tile < last, other=0)
    else:
        keys = tile * N + tl.arange(0, N)
        page = tl.load(table + keys // BLOCK_SIZE, mask=(keys < seq_len) & (tile < last), other=0)
    return page.to(tl.int64)


@triton.jit
def attend(
    acc, largest, total, q, k_cache, v_cache, table, head, position, seq_len, first, last, scale,
    MASKED: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Take in the key tiles [first, last): online softmax (arXiv 1805.02867) in base 2.

    acc [M, D], largest and total [M] are the sums so far; position [M] is the last key that a
    query sees. Not MASKED: every query sees every key of the tiles.
    """
    dims = tl.arange(0, D)
    inside = (dims < HEAD_DIM)[None, :]
    offsets = tl.arange(0, N)
    page = _page(table, first, last, seq_len, BLOCK_SIZE, N)
    for tile in range(first, last):
        keys = tile * N + offsets
        if BLOCK_SIZE % N == 0:
            base = (page * BLOCK_SIZE + tile * N % BLOCK_SIZE) * KV_HEADS * HEAD_DIM
            places = ((offsets * KV_HEADS + head) * HEAD_DIM)[:, None] + dims[None, :]
            k_places, v_places = k_cache + base + places, v_cache + base + places
        else:
            slots = page * BLOCK_SIZE + keys % BLOCK_SIZE
            places = ((slots * KV_HEADS + head) * HEAD_DIM)[:, None] + dims[None, :]
            k_places, v_places = k_cache + places, v_cache + places
        page = _page(table, tile + 1, last, seq_len, BLOCK_SIZE, N)
        if MASKED:
            mask = (keys < seq_len)[:, None] & inside
            k = tl.load(k_places, mask=mask, other=0.0)
            v = tl.load(v_places, mask=mask, other=0.0)
        elif D == HEAD_DIM:
            k = tl.load(k_places)
            v = tl.load(v_places)
        else:
            k = tl.load(k_places, mask=inside, other=0.0)
            v = tl.load(v_places, mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="tf32x3")
        if MASKED:
            scores = tl.where(keys[None, :] <= position[:, None], scores, float("-inf"))
        # One rounding, spelt out: masked and unmasked tiles must not differ in a bit.
        new_largest = tl.maximum(largest, tl.max(scores, 1) * scale)
        weights = tl.exp2(tl.fma(scores, scale, -new_largest[:, None]))
        shrink = tl.exp2(largest - new_largest)
        total = tl.fma(total, shrink, tl.sum(weights, 1))
        v = v.to(q.dtype)
        acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None], input_precision="tf32x3")
        largest = new_largest
    return acc, largest, total
