"""The Triton kernels that turn logits into token ids, each row by its own rule.

A row's token depends on nothing but the row, no sum depends on the order in which programs run, and
nothing waits for the host, so a CUDA graph can hold every call. Imports triton: ask
`nanovllm.kernels` before this.
"""

import torch
import triton
import triton.language as tl

from nanovllm.sampling_params import GREEDY_BELOW

_BLOCK = 2048
"""Logits that one program reduces."""
_CHUNK = 128
"""Logits that a search reads, or skips, together."""
_TILE = 32
"""Chunks that a search reads at once."""
_PIVOTS = tl.constexpr(8)
"""Parts into which a pass of a search cuts the range that is left; a power of two."""


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """Return the first of the largest logits of each row of [R, vocab_size]: [R] int64."""
    return _choose_tokens(logits, None, None, None, None, None, None)


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
) -> torch.Tensor:
    """Draw a token for each row as `layers.sampler.draw` does in torch.

    As many programs as there are blocks in the logits reduce them; then one program for each row
    finds the block and the token. A row with top_k or top_p first finds the smallest logit that
    they keep, by counting or weighing what reaches pivots between two bounds, which it narrows to
    one number: a search with several pivots, as in FlashInfer's sampling (Ye et al., 2025), but
    over the floats in their order as integers, so that it ends, and is exact.

    Args:
        logits: [R, vocab_size], any float dtype; rows contiguous.
        temperatures: [R] float32; a row below GREEDY_BELOW takes the first of its largest logits.
        seeds: [R] int64.
        positions: [R] int64.
        top_ks: [R] int64, at least 1; from vocab_size up it keeps all.
        top_ps: [R] float32 in [0, 1].
        min_ps: [R] float32; this and the five above contiguous.

    Returns:
        [R] int64.
    """
    return _choose_tokens(logits, temperatures, seeds, positions, top_ks, top_ps, min_ps)


def _choose_tokens(
    logits: torch.Tensor,
    temperatures: torch.Tensor | None,
    seeds: torch.Tensor | None,
    positions: torch.Tensor | None,
    top_ks: torch.Tensor | None,
    top_ps: torch.Tensor | None,
    min_ps: torch.Tensor | None,
) -> torch.Tensor:
    rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    block = min(triton.next_power_of_2(vocab_size), _BLOCK)
    num_blocks = triton.cdiv(vocab_size, block)
    chunk = min(block, _CHUNK)
    num_chunks = num_blocks * (block // chunk)
    maxima = logits.new_empty(rows, num_blocks, dtype=torch.float32)
    sums = torch.empty_like(maxima)
    firsts = torch.empty_like(maxima, dtype=torch.int32)
    chunk_keys, listed = logits.new_empty(2, rows, num_chunks, dtype=torch.int32).unbind()
    listed_sums = torch.empty_like(listed, dtype=torch.float32)
    tokens = logits.new_empty(rows, dtype=torch.int64)
    if rows == 0:
        return tokens
    _reduce_blocks[(rows, num_blocks)](
        logits,
        logits.stride(0),
        vocab_size,
        temperatures,
        top_ks,
        top_ps,
        maxima,
        sums,
        firsts,
        chunk_keys,
        GREEDY_BELOW=GREEDY_BELOW,
        BLOCK=block,
        CHUNK=chunk,
    )
    _choose[(rows,)](
        logits,
        logits.stride(0),
        vocab_size,
        temperatures,
        seeds,
        positions,
        top_ks,
        top_ps,
        min_ps,
        maxima,
        sums,
        firsts,
        tokens,
        GREEDY_BELOW=GREEDY_BELOW,
        BLOCK=block,
        NUM_BLOCKS=num_blocks,
        ALL_BLOCKS=triton.next_power_of_2(num_blocks),
    )
    if temperatures is None:
        return tokens
    all_chunks = triton.next_power_of_2(num_chunks)
    _choose_kept[(rows,)](
        logits,
        logits.stride(0),
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
        GREEDY_BELOW=GREEDY_BELOW,
        NUM_BLOCKS=num_blocks,
        ALL_BLOCKS=triton.next_power_of_2(num_blocks),
        SIZES=(num_chunks, all_chunks, chunk, min(all_chunks, _TILE)),
        num_warps=8,
    )
    return tokens


@triton.jit
def _reduce_blocks(
    logits,
    stride,
    vocab_size,
    temperatures,
    top_ks,
    top_ps,
    maxima,
    sums,
    firsts,
    chunk_keys,
    GREEDY_BELOW: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One block of one row: its largest logit, where it first is, and the sum of the weights,
    relative to that largest one; in a row with top_k or top_p also the largest key of each chunk.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(logits + row * stride + columns, columns < vocab_size, -float("inf"))
    x = logit.to(tl.float32)
    largest, first = tl.max(x, 0, return_indices=True)
    place = row * tl.num_programs(1) + block
    tl.store(maxima + place, largest)
    tl.store(firsts + place, block * BLOCK + first)
    if temperatures is not None:
        scale = 1 / tl.maximum(tl.load(temperatures + row), GREEDY_BELOW)
        # Where all of a block is forbidden, its weights are exp(-inf), not exp(-inf + inf).
        base = tl.where(largest > -float("inf"), largest, 0.0)
        tl.store(sums + place, tl.sum(tl.exp((x - base) * scale)))
        if _is_cut(row, vocab_size, temperatures, top_ks, top_ps, GREEDY_BELOW):
            keys = tl.max(tl.reshape(_key(logit), (BLOCK // CHUNK, CHUNK)), 1)
            chunks = place * (BLOCK // CHUNK) + tl.arange(0, BLOCK // CHUNK)
            tl.store(chunk_keys + chunks, keys.to(tl.int32, bitcast=True))


@triton.jit
def _choose(
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
    sums,
    firsts,
    tokens,
    GREEDY_BELOW: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    ALL_BLOCKS: tl.constexpr,
):
    """One row: find the block, then the token, where the weights' sum passes a uniform number.
    A row with top_k or top_p is left to `_choose_kept`.
    """
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, ALL_BLOCKS)
    place = row * NUM_BLOCKS + blocks
    block_maxima = tl.load(maxima + place, blocks < NUM_BLOCKS, -float("inf"))
    largest, block = tl.max(block_maxima, 0, return_indices=True)
    token = tl.load(firsts + row * NUM_BLOCKS + block)
    if temperatures is not None:
        temperature = tl.load(temperatures + row)
        cut = _is_cut(row, vocab_size, temperatures, top_ks, top_ps, GREEDY_BELOW)
        if (temperature >= GREEDY_BELOW) & ~cut:
            logits += row * stride
            scale = 1 / temperature
            min_p = tl.load(min_ps + row)
            mass = tl.load(sums + place, blocks < NUM_BLOCKS, 0.0)
            mass *= tl.exp((block_maxima - largest) * scale)
            if min_p > 0:  # relative to the row's largest, which the sums were made without
                for i in range(NUM_BLOCKS):
                    weights = _weights(logits, vocab_size, i, largest, scale, min_p, BLOCK)
                    mass = tl.where(blocks == i, tl.sum(weights), mass)
            mass = mass.to(tl.float64)
            number = _uniform(tl.load(seeds + row), tl.load(positions + row))
            block, before = _invert(mass, number * tl.sum(mass))
            share = number * tl.sum(mass) - before
            share /= tl.sum(tl.where(blocks == block, mass, 0.0))
            weights = _weights(logits, vocab_size, block, largest, scale, min_p, BLOCK)
            weights = weights.to(tl.float64)
            column, _ = _invert(weights, share * tl.sum(weights))
            token = tl.minimum(block * BLOCK + column, vocab_size - 1)
    tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def _is_cut(row, vocab_size, temperatures, top_ks, top_ps, GREEDY_BELOW: tl.constexpr):
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
    if _is_cut(index, vocab_size, temperatures, top_ks, top_ps, GREEDY_BELOW):
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
        number = _uniform(tl.load(seeds + index), tl.load(positions + index))
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
        bound = tl.maximum(_key(least.to(logits.dtype.element_ty)) - 1, low)
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
    place, before = _invert(mass, number * tl.sum(mass))
    share = number * tl.sum(mass) - before
    share /= tl.sum(tl.where(chunks == place, mass, 0.0))
    columns = tl.load(listed + place) * SIZES[2] + tl.arange(0, SIZES[2])
    logits, vocab_size, largest, scale, min_p = row
    x = tl.load(logits + columns, columns < vocab_size, -float("inf"))
    weights = tl.where(_key(x) >= threshold, _weigh(x, largest, scale, min_p), 0.0)
    weights = weights.to(tl.float64)
    column, _ = _invert(weights, share * tl.sum(weights))
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
    return tl.where(inside, _key(x), 0), _weigh(x, largest, scale, min_p)


@triton.jit
def _key(x):
    """Return uint32 in the order of the floats x; both zeros are one number."""
    sign = tl.full((), 1 << (x.dtype.primitive_bitwidth - 1), tl.uint32)
    if x.dtype.primitive_bitwidth == 16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32)
    else:
        bits = x.to(tl.uint32, bitcast=True)
    bits = tl.where(bits == sign, 0, bits)
    return tl.where(bits >= sign, sign + (sign - 1) - bits, sign + bits)


@triton.jit
def _weights(logits, vocab_size, block, largest, scale, min_p, BLOCK: tl.constexpr):
    """Return the weights of one block of a row, 0 for what min_p leaves out."""
    columns = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + columns, columns < vocab_size, -float("inf"))
    return _weigh(x, largest, scale, min_p)


@triton.jit
def _weigh(x, largest, scale, min_p):
    """Return the weights of logits x, relative to the largest; 0 for what min_p leaves out."""
    weights = tl.exp((x.to(tl.float32) - largest) * scale)
    return tl.where(weights < min_p, 0.0, weights)


@triton.jit
def _invert(weights, target):
    """Return the first place at which the sum of `weights` passes `target`, and the sum before it.

    Where rounding leads past the end, it is the last place with any weight; never one without.
    """
    places = tl.arange(0, weights.shape[0])
    sums = tl.cumsum(weights)
    last = tl.max(tl.where(weights > 0, places, 0))
    place = tl.min(tl.where((weights > 0) & (sums > target), places, last))
    return place, tl.sum(tl.where(places < place, weights, 0.0))


@triton.jit
def _uniform(seed, position):
    """`layers.sampler.uniform` of one pair."""
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    mixed = _mix(_mix(seed.to(tl.uint64) + golden) + (position.to(tl.uint64) + 1) * golden)
    return (mixed >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2**-53


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return x ^ (x >> 31)
