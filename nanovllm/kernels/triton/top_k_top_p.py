"""The Triton kernel that samples rows with top_k or top_p, with a search instead of a sort.

It needs the maxima that the kernels of `sampling` leave in memory. It knows no other rows.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.triton.inverse_cdf import invert, uniform, weigh
from nanovllm.sampling_params import GREEDY_BELOW

_TILE = 32
"""Chunks of logits that the search reads at once."""
_PIVOTS = tl.constexpr(8)
"""A pass of the search divides the remaining range into this many parts; a power of two."""


def choose_filtered(
    logits: torch.Tensor,
    parameters: tuple[torch.Tensor, ...],
    block_maxima: torch.Tensor,
    chunk_keys: torch.Tensor,
    chunk: int,
    tokens: torch.Tensor,
) -> None:
    """Write a token into `tokens` [R] int64 for each row with top_k or top_p, unless it has -1.

    First find the threshold: the smallest logit that top_k and top_p keep. The search counts or
    weighs the logits above several pivots between two bounds, then narrows the bounds to two
    neighbouring pivots, as in FlashInfer's sampling (Ye et al., 2025). The pivots are the integers
    of `sort_key`, so the search ends with the exact logit. Then draw among the kept logits.

    Args:
        parameters: temperatures, seeds, positions, top_ks, top_ps and min_ps of `sampling.sample`.
        block_maxima: [R, num_blocks] float32, the largest logit of each block.
        chunk_keys: [R, num_chunks] int32, the bits of the largest `sort_key` of each chunk.
        chunk: logits in a chunk.
    """
    rows, vocab_size = logits.shape
    num_blocks, num_chunks = block_maxima.shape[1], chunk_keys.shape[1]
    all_chunks = triton.next_power_of_2(num_chunks)
    candidates = torch.empty_like(chunk_keys)
    candidate_sums = torch.empty_like(chunk_keys, dtype=torch.float32)
    _choose_filtered[(rows,)](
        logits, logits.stride(0), vocab_size, *parameters,
        block_maxima, chunk_keys, candidates, candidate_sums, tokens,
        GREEDY_BELOW=GREEDY_BELOW,
        NUM_BLOCKS=num_blocks, ALL_BLOCKS=triton.next_power_of_2(num_blocks),
        NUM_CHUNKS=num_chunks, ALL_CHUNKS=all_chunks, CHUNK=chunk, TILE=min(all_chunks, _TILE),
        num_warps=8,
    )  # fmt: skip


@triton.jit
def is_filtered(row, vocab_size, temperatures, top_ks, top_ps, GREEDY_BELOW: tl.constexpr):
    """Return whether the row is not greedy and its top_k or top_p may exclude tokens."""
    filtered = (tl.load(top_ks + row) < vocab_size) | (tl.load(top_ps + row) < 1)
    return (tl.load(temperatures + row) >= GREEDY_BELOW) & filtered


@triton.jit
def sort_key(x):
    """Return uint32 numbers in the order of the floats x. Both zeros have the same key."""
    sign = tl.full((), 1 << (x.dtype.primitive_bitwidth - 1), tl.uint32)
    if x.dtype.primitive_bitwidth == 16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32)
    else:
        bits = x.to(tl.uint32, bitcast=True)
    bits = tl.where(bits == sign, 0, bits)
    return tl.where(bits >= sign, sign + (sign - 1) - bits, sign + bits)


@triton.jit
def _choose_filtered(
    logits, stride, vocab_size, temperatures, seeds, positions, top_ks, top_ps, min_ps,
    block_maxima, chunk_keys, candidates, candidate_sums, tokens,
    GREEDY_BELOW: tl.constexpr, NUM_BLOCKS: tl.constexpr, ALL_BLOCKS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr, ALL_CHUNKS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sample one row if it has top_k or top_p: find the threshold, then draw a token.

    A row whose token is -1 is no distribution and stays as it is. ALL_BLOCKS and ALL_CHUNKS are
    NUM_BLOCKS and NUM_CHUNKS rounded up to a power of two.
    """
    index = tl.program_id(0).to(tl.int64)
    filtered = is_filtered(index, vocab_size, temperatures, top_ks, top_ps, GREEDY_BELOW)
    if filtered & (tl.load(tokens + index) >= 0):
        blocks = tl.arange(0, ALL_BLOCKS)
        places = index * NUM_BLOCKS + blocks
        largest = tl.max(tl.load(block_maxima + places, blocks < NUM_BLOCKS, -float("inf")))
        row = (
            logits + index * stride,
            vocab_size,
            largest,
            1 / tl.load(temperatures + index),
            tl.load(min_ps + index),
        )
        first = index * NUM_CHUNKS
        chunks = (chunk_keys + first, candidates + first, candidate_sums + first)
        top_k, top_p = tl.load(top_ks + index), tl.load(top_ps + index)
        threshold = find_threshold(row, chunks, top_k, top_p, NUM_CHUNKS, ALL_CHUNKS, CHUNK, TILE)
        number = uniform(tl.load(seeds + index), tl.load(positions + index))
        token = _draw(row, chunks, threshold, number, NUM_CHUNKS, ALL_CHUNKS, CHUNK, TILE)
        tl.store(tokens + index, tl.minimum(token, vocab_size - 1).to(tl.int64))


@triton.jit
def find_threshold(
    row, chunks, top_k, top_p,
    NUM_CHUNKS: tl.constexpr, ALL_CHUNKS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return the key of the smallest logit that top_k, and then top_p, keep.

    Args:
        row: logits, vocab_size, the largest logit, 1 / temperature, min_p.
        chunks: for each chunk its largest key; scratch memory for the indices and for the sums of
            weights of the candidate chunks, those that the search still reads.
    """
    logits, vocab_size, largest, scale, min_p = row
    keys = _load_chunk_keys(chunks, NUM_CHUNKS, ALL_CHUNKS)
    high = tl.max(keys)
    low = tl.zeros_like(high)
    if top_k < vocab_size:
        # At least k logits reach the k-th largest of the chunks' keys: it is a lower bound.
        top = high
        while low < top:
            step = (top - low) // _PIVOTS + 1
            low, top = _narrow(low, top, step, _pivot_sums(keys, 1.0, low, low, step), top_k)
        low = _search(row, chunks, low, low, high, top_k, True, NUM_CHUNKS, ALL_CHUNKS, CHUNK, TILE)
    if top_p < 1:
        # The largest logit weighs 1. So all logits lighter than (1 - top_p) / vocab_size together
        # weigh less than 1 - top_p of the row, and the threshold is not among them. The factor and
        # the subtraction allow for rounding.
        least = tl.maximum((1 - top_p) / vocab_size, min_p)
        least = largest + tl.log(least * 0.99) / scale
        bound = tl.maximum(sort_key(least.to(logits.dtype.element_ty)) - 1, low)
        low = _search(
            row, chunks, low, bound, high, top_p, False, NUM_CHUNKS, ALL_CHUNKS, CHUNK, TILE
        )
    return low


@triton.jit
def _search(
    row, chunks, floor, low, high, target, COUNT: tl.constexpr,
    NUM_CHUNKS: tl.constexpr, ALL_CHUNKS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return the largest key in [low, high] that enough logits reach.

    COUNT: at least `target` logits. Otherwise logits with at least the share `target` of the weight
    of all logits that reach `floor`.
    """
    target_sum = tl.full((), -1.0, tl.float64)
    while low < high:
        step = (high - low) // _PIVOTS + 1
        count = _list_candidates(chunks, floor, NUM_CHUNKS, ALL_CHUNKS)
        sums = tl.zeros([_PIVOTS], tl.float64)
        for i in range(0, count, TILE):
            keys, weights = _load_tile(row, chunks, i, count, CHUNK, TILE)
            if COUNT:
                weights = 1.0
            sums += _pivot_sums(keys, weights, floor, low, step)
        if COUNT:
            target_sum = target.to(tl.float64)
        else:
            whole = tl.sum(tl.where(tl.arange(0, _PIVOTS) == 0, sums, 0.0))
            target_sum = tl.where(target_sum < 0, target.to(tl.float64) * whole, target_sum)
        low, high = _narrow(low, high, step, sums, target_sum)
        floor = low
    return low


@triton.jit
def _pivot_sums(keys, weights, floor, low, step):
    """Return [_PIVOTS] float64, the weight of the keys that reach each pivot.

    The pivots are floor, low + step, low + 2 * step and so on.
    """
    sums = tl.zeros([_PIVOTS], tl.float64)
    for i in range(_PIVOTS):  # not unrolled, because then the values would not fit into registers
        pivot = tl.where(i == 0, floor, low + i * step)
        total = tl.sum(tl.where(keys >= pivot, weights, 0.0))
        sums = tl.where(tl.arange(0, _PIVOTS) == i, total.to(tl.float64), sums)
    return sums


@triton.jit
def _narrow(low, high, step, sums, target_sum):
    """Return new bounds: the last pivot that reaches `target_sum`, and the key before the next."""
    reached = (sums >= target_sum) & (tl.arange(0, _PIVOTS) > 0)
    low += tl.sum(reached.to(tl.uint32)) * step
    return low, tl.minimum(high, low + step - 1)


@triton.jit
def _draw(
    row, chunks, threshold, number,
    NUM_CHUNKS: tl.constexpr, ALL_CHUNKS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return the token at which the sum of the kept weights exceeds `number` times their total.

    Find the chunk first, then the token in it.
    """
    _, candidates, candidate_sums = chunks
    count = _list_candidates(chunks, threshold, NUM_CHUNKS, ALL_CHUNKS)
    for i in range(0, count, TILE):
        keys, weights = _load_tile(row, chunks, i, count, CHUNK, TILE)
        places = i + tl.arange(0, TILE)
        sums = tl.sum(tl.where(keys >= threshold, weights, 0.0), 1)
        tl.store(candidate_sums + places, sums, places < count)
    tl.debug_barrier()  # threads read sums that other threads have stored
    indices = tl.arange(0, ALL_CHUNKS)
    mass = tl.load(candidate_sums + indices, indices < count, 0.0).to(tl.float64)
    place, before = invert(mass, number * tl.sum(mass))
    share = number * tl.sum(mass) - before
    share /= tl.sum(tl.where(indices == place, mass, 0.0))
    columns = tl.load(candidates + place) * CHUNK + tl.arange(0, CHUNK)
    logits, vocab_size, largest, scale, min_p = row
    x = tl.load(logits + columns, columns < vocab_size, -float("inf"))
    weights = tl.where(sort_key(x) >= threshold, weigh(x, largest, scale, min_p), 0.0)
    weights = weights.to(tl.float64)
    column, _ = invert(weights, share * tl.sum(weights))
    return tl.load(candidates + place) * CHUNK + column


@triton.jit
def _load_chunk_keys(chunks, NUM_CHUNKS: tl.constexpr, ALL_CHUNKS: tl.constexpr):
    """Return [ALL_CHUNKS] uint32, the largest key of each chunk; 0 past the last chunk."""
    indices = tl.arange(0, ALL_CHUNKS)
    keys = tl.load(chunks[0] + indices, indices < NUM_CHUNKS, 0)
    return keys.to(tl.uint32, bitcast=True)


@triton.jit
def _list_candidates(chunks, floor, NUM_CHUNKS: tl.constexpr, ALL_CHUNKS: tl.constexpr):
    """List the chunks whose largest key reaches `floor`, in order; return their number."""
    indices = tl.arange(0, ALL_CHUNKS)
    mask = (_load_chunk_keys(chunks, NUM_CHUNKS, ALL_CHUNKS) >= floor) & (indices < NUM_CHUNKS)
    places = tl.cumsum(mask.to(tl.int32)) - 1
    tl.debug_barrier()  # all threads have read the previous list
    tl.store(chunks[1] + places, indices, mask)
    tl.debug_barrier()  # no thread reads the new list before it is complete
    return tl.sum(mask.to(tl.int32))


@triton.jit
def _load_tile(row, chunks, first, count, CHUNK: tl.constexpr, TILE: tl.constexpr):
    """Return [TILE, CHUNK] keys and weights of the candidates from `first` on; 0 past `count`."""
    logits, vocab_size, largest, scale, min_p = row
    places = first + tl.arange(0, TILE)
    indices = tl.load(chunks[1] + places, places < count, 0)
    columns = indices[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    inside = (places < count)[:, None] & (columns < vocab_size)
    x = tl.load(logits + columns, inside, -float("inf"))
    return tl.where(inside, sort_key(x), 0), weigh(x, largest, scale, min_p)
