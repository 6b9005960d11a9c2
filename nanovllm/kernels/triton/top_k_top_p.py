"""The kernel that chooses among what top_k and top_p keep, by a search instead of a sort.

Knows rows of logits and what `sampling` has left of them; finds no row's largest logit itself.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.triton.inverse_cdf import invert, uniform, weigh
from nanovllm.sampling_params import GREEDY_BELOW

_TILE = 32
"""Chunks that a search reads at once."""
_PIVOTS = tl.constexpr(8)
"""Parts into which a pass of a search cuts the range that is left; a power of two."""


def choose_filtered(
    logits: torch.Tensor,
    parameters: tuple[torch.Tensor, ...],
    maxima: torch.Tensor,
    chunk_keys: torch.Tensor,
    chunk: int,
    tokens: torch.Tensor,
) -> None:
    """Write a token into `tokens` [R] int64 for each row with top_k or top_p.

    Args:
        parameters: temperatures, seeds, positions, top_ks, top_ps and min_ps of `sampling.sample`.
        maxima: [R, num_blocks] float32, the largest logit of each block.
        chunk_keys: [R, num_chunks] int32, the key of the largest logit of each chunk.
        chunk: logits in a chunk.
    """
    rows, vocab_size = logits.shape
    num_blocks, num_chunks = maxima.shape[1], chunk_keys.shape[1]
    all_chunks = triton.next_power_of_2(num_chunks)
    listed = torch.empty_like(chunk_keys)
    listed_sums = torch.empty_like(chunk_keys, dtype=torch.float32)
    _choose_kept[(rows,)](
        logits, logits.stride(0), vocab_size, *parameters,
        maxima, chunk_keys, listed, listed_sums, tokens,
        GREEDY_BELOW=GREEDY_BELOW, NUM_BLOCKS=num_blocks,
        ALL_BLOCKS=triton.next_power_of_2(num_blocks),
        SIZES=(num_chunks, all_chunks, chunk, min(all_chunks, _TILE)), num_warps=8,
    )  # fmt: skip


@triton.jit
def is_cut(row, vocab_size, temperatures, top_ks, top_ps, GREEDY_BELOW: tl.constexpr):
    """Return whether the row is drawn, and top_k or top_p may leave something out."""
    cut = (tl.load(top_ks + row) < vocab_size) | (tl.load(top_ps + row) < 1)
    return (tl.load(temperatures + row) >= GREEDY_BELOW) & cut


@triton.jit
def _choose_kept(
    logits,
    stride,
    vocab_size,
    temperatures,
    seeds,
    positions,
    top_ks,
    top_ps,
    min_ps,
    maxima,
    chunk_keys,
    listed,
    listed_sums,
    tokens,
    GREEDY_BELOW: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    ALL_BLOCKS: tl.constexpr,
    SIZES: tl.constexpr,
):
    """One row with top_k or top_p: find what they keep, then a token among it.

    SIZES are the number of chunks, the next power of two, the size of a chunk and of a tile.
    """
    index = tl.program_id(0).to(tl.int64)
    if is_cut(index, vocab_size, temperatures, top_ks, top_ps, GREEDY_BELOW):
        blocks = tl.arange(0, ALL_BLOCKS)
        places = index * NUM_BLOCKS + blocks
        largest = tl.max(tl.load(maxima + places, blocks < NUM_BLOCKS, -float("inf")))
        row = (
            logits + index * stride,
            vocab_size,
            largest,
            1 / tl.load(temperatures + index),
            tl.load(min_ps + index),
        )
        first = index * SIZES[0]
        lists = (chunk_keys + first, listed + first, listed_sums + first)
        top_k, top_p = tl.load(top_ks + index), tl.load(top_ps + index)
        threshold = _threshold(row, lists, top_k, top_p, SIZES)
        number = uniform(tl.load(seeds + index), tl.load(positions + index))
        token = _draw_kept(row, lists, threshold, number, SIZES)
        tl.store(tokens + index, tl.minimum(token, vocab_size - 1).to(tl.int64))


@triton.jit
def _threshold(row, lists, top_k, top_p, SIZES: tl.constexpr):
    """Return the key of the smallest logit of a row that top_k and then top_p keep."""
    logits, vocab_size, largest, scale, min_p = row
    keys = _load_keys(lists, SIZES)
    high = tl.max(keys)
    low = tl.zeros_like(high)
    if top_k < vocab_size:
        # No fewer logits reach the k-th largest key of a chunk than there are such chunks.
        top = high
        while low < top:
            step = (top - low) // _PIVOTS + 1
            low, top = _narrow(low, top, step, _sums(keys, 1.0, low, low, step), top_k)
        low = _search(row, lists, low, low, high, top_k, True, SIZES)
    if top_p < 1:
        # All logits of less than this weight together have less than 1 - top_p of the whole.
        # Rounding may lead upwards, hence one key less.
        least = tl.maximum((1 - top_p) / vocab_size, min_p)
        least = largest + tl.log(least * 0.99) / scale
        bound = tl.maximum(key(least.to(logits.dtype.element_ty)) - 1, low)
        bound = tl.minimum(bound, high)  # where rows are no distribution, some chunk is kept
        low = _search(row, lists, low, bound, high, top_p, False, SIZES)
    return low


@triton.jit
def _search(row, lists, floor, low, high, wanted, COUNT: tl.constexpr, SIZES: tl.constexpr):
    """Return the largest key from `low` to `high` such that the logits that reach it are at least
    `wanted` (COUNT), or have at least this share of the weight of those that reach `floor`.
    """
    target = tl.full((), -1.0, tl.float64)
    while low < high:
        step = (high - low) // _PIVOTS + 1
        count = _list_chunks(lists, floor, SIZES)
        sums = tl.zeros([_PIVOTS], tl.float64)
        for i in range(0, count, SIZES[3]):
            keys, weights = _load_tile(row, lists, i, count, SIZES)
            if COUNT:
                weights = 1.0
            sums += _sums(keys, weights, floor, low, step)
        if COUNT:
            target = wanted.to(tl.float64)
        else:
            whole = tl.sum(tl.where(tl.arange(0, _PIVOTS) == 0, sums, 0.0))
            target = tl.where(target < 0, wanted.to(tl.float64) * whole, target)
        low, high = _narrow(low, high, step, sums, target)
        floor = low
    return low


@triton.jit
def _sums(keys, weights, floor, low, step):
    """Return [_PIVOTS] float64, the weights of the keys that reach `floor`, then of those that
    reach `low + step`, `low + 2 * step` and so on.
    """
    sums = tl.zeros([_PIVOTS], tl.float64)
    for i in range(_PIVOTS):  # not unrolled: what is in flight would not fit into registers
        pivot = tl.where(i == 0, floor, low + i * step)
        total = tl.sum(tl.where(keys >= pivot, weights, 0.0))
        sums = tl.where(tl.arange(0, _PIVOTS) == i, total.to(tl.float64), sums)
    return sums


@triton.jit
def _narrow(low, high, step, sums, target):
    """Return the bounds between which the sum falls below `target`: two neighbouring pivots."""
    reached = (sums >= target) & (tl.arange(0, _PIVOTS) > 0)
    low += tl.sum(reached.to(tl.uint32)) * step
    return low, tl.minimum(high, low + step - 1)


@triton.jit
def _draw_kept(row, lists, threshold, number, SIZES: tl.constexpr):
    """Find the chunk, then the token, where the sum of the weights of those whose keys reach
    `threshold` passes `number` times the whole.
    """
    _, listed, listed_sums = lists
    count = _list_chunks(lists, threshold, SIZES)
    for i in range(0, count, SIZES[3]):
        keys, weights = _load_tile(row, lists, i, count, SIZES)
        places = i + tl.arange(0, SIZES[3])
        sums = tl.sum(tl.where(keys >= threshold, weights, 0.0), 1)
        tl.store(listed_sums + places, sums, places < count)
    tl.debug_barrier()  # the sums are read by other threads than wrote them
    chunks = tl.arange(0, SIZES[1])
    mass = tl.load(listed_sums + chunks, chunks < count, 0.0).to(tl.float64)
    place, before = invert(mass, number * tl.sum(mass))
    share = number * tl.sum(mass) - before
    share /= tl.sum(tl.where(chunks == place, mass, 0.0))
    columns = tl.load(listed + place) * SIZES[2] + tl.arange(0, SIZES[2])
    logits, vocab_size, largest, scale, min_p = row
    x = tl.load(logits + columns, columns < vocab_size, -float("inf"))
    weights = tl.where(key(x) >= threshold, weigh(x, largest, scale, min_p), 0.0)
    weights = weights.to(tl.float64)
    column, _ = invert(weights, share * tl.sum(weights))
    return tl.load(listed + place) * SIZES[2] + column


@triton.jit
def _load_keys(lists, SIZES: tl.constexpr):
    """Return [ALL_CHUNKS] uint32, the keys of the chunks' largest logits; 0 past the last."""
    chunks = tl.arange(0, SIZES[1])
    keys = tl.load(lists[0] + chunks, chunks < SIZES[0], 0)
    return keys.to(tl.uint32, bitcast=True)


@triton.jit
def _list_chunks(lists, floor, SIZES: tl.constexpr):
    """List the chunks with a logit whose key reaches `floor`, in their order; return how many."""
    chunks = tl.arange(0, SIZES[1])
    wanted = (_load_keys(lists, SIZES) >= floor) & (chunks < SIZES[0])
    places = tl.cumsum(wanted.to(tl.int32)) - 1
    tl.debug_barrier()  # all have read the list before
    tl.store(lists[1] + places, chunks, wanted)
    tl.debug_barrier()  # and none reads this one before it is there
    return tl.sum(wanted.to(tl.int32))


@triton.jit
def _load_tile(row, lists, first, count, SIZES: tl.constexpr):
    """Return [TILE, CHUNK] keys and weights of the listed chunks from `first`, 0 past `count`."""
    logits, vocab_size, largest, scale, min_p = row
    places = first + tl.arange(0, SIZES[3])
    chunks = tl.load(lists[1] + places, places < count, 0)
    columns = chunks[:, None] * SIZES[2] + tl.arange(0, SIZES[2])[None, :]
    inside = (places < count)[:, None] & (columns < vocab_size)
    x = tl.load(logits + columns, inside, -float("inf"))
    return tl.where(inside, key(x), 0), weigh(x, largest, scale, min_p)


@triton.jit
def key(x):
    """Return uint32 in the order of the floats x; both zeros are one number."""
    sign = tl.full((), 1 << (x.dtype.primitive_bitwidth - 1), tl.uint32)
    if x.dtype.primitive_bitwidth == 16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32)
    else:
        bits = x.to(tl.uint32, bitcast=True)
    bits = tl.where(bits == sign, 0, bits)
    return tl.where(bits >= sign, sign + (sign - 1) - bits, sign + bits)
