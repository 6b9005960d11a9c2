"""What the sampling kernels do for one row: inverse transform sampling, and the search for the
smallest logit that top_k and top_p keep, without a sort. Launches no kernel.
"""

import triton
import triton.language as tl

_PIVOTS = tl.constexpr(8)
"""A pass of the search divides the remaining range into this many parts; a power of two."""
_HALVINGS = tl.constexpr(8)
"""Halvings of the range in which the first lower bound for top_p is sought."""


@triton.jit
def weigh(x, largest, scale, min_p):
    """Return exp((x - largest) * scale) in float32, the weights of logits x; 0 below min_p.

    `largest` is the largest logit of the row, so min_p compares with the largest weight, 1.
    """
    weights = tl.exp((x.to(tl.float32) - largest) * scale)
    return tl.where(weights < min_p, 0.0, weights)


@triton.jit
def invert(weights, target):
    """Return the first index whose cumulative weight exceeds `target`, and the sum before it.

    The index always has a weight above 0. If rounding makes `target` exceed the whole sum, return
    the last such index.
    """
    indices = tl.arange(0, weights.shape[0])
    sums = tl.cumsum(weights)
    last = tl.max(tl.where(weights > 0, indices, 0))
    index = tl.min(tl.where((weights > 0) & (sums > target), indices, last))
    return index, tl.sum(tl.where(indices < index, weights, 0.0))


@triton.jit
def uniform(seed, position):
    """Return the float64 in [0, 1) that `layers.sampler.uniform` returns for one row."""
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    mixed = _mix(_mix(seed.to(tl.uint64) + golden) + (position.to(tl.uint64) + 1) * golden)
    return (mixed >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2**-53


@triton.jit
def _mix(x):
    """Return the bits of x, mixed as in SplitMix64 (Steele et al., 2014)."""
    x = (x ^ (x >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def has_filter(vocab_size, top_k, top_p):
    """Return whether top_k or top_p may exclude tokens."""
    return (top_k < vocab_size) | (top_p < 1)


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
def find_threshold(
    row, chunks, top_k, top_p,
    NUM_CHUNKS: tl.constexpr, ALL_CHUNKS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return the key of the smallest logit that top_k, and then top_p, keep.

    The search counts or weighs the logits above several pivots between two bounds, then narrows the
    bounds to two neighbouring pivots, as in FlashInfer's sampling (Ye et al., 2025). The pivots are
    the integers of `sort_key`, so the search ends with the exact logit.

    Args:
        row: logits, vocab_size, the largest logit, 1 / temperature, min_p.
        chunks: for each chunk its largest key; scratch memory for the indices of the candidates,
            the chunks that the search still reads; and the sum of its weights, which is needed only
            if top_k keeps all tokens. Afterwards this is the sum of the weights of kept logits.
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
            low, top = _narrow(low, top, step, _pivot_sums(keys, 1.0, low, step), top_k)
        low = _search(row, chunks, low, high, top_k, True, NUM_CHUNKS, ALL_CHUNKS, CHUNK, TILE)
        _sum_kept(row, chunks, low, NUM_CHUNKS, ALL_CHUNKS, CHUNK, TILE)
    if top_p < 1:
        indices = tl.arange(0, ALL_CHUNKS)
        sums = tl.load(chunks[2] + indices, indices < NUM_CHUNKS, 0.0)
        target = top_p.to(tl.float64) * tl.sum(sums.to(tl.float64))
        least = tl.maximum(_least_weight(sums, vocab_size, top_p, CHUNK), min_p)
        # The factor and the subtraction allow for rounding.
        least = largest + tl.log(least * 0.99) / scale
        low = tl.maximum(sort_key(least.to(logits.dtype.element_ty)) - 1, low)
        low = _search(row, chunks, low, high, target, False, NUM_CHUNKS, ALL_CHUNKS, CHUNK, TILE)
        _sum_kept(row, chunks, low, NUM_CHUNKS, ALL_CHUNKS, CHUNK, TILE)
    return low


@triton.jit
def _least_weight(sums, vocab_size, top_p, CHUNK: tl.constexpr):
    """Return a weight that the smallest logit which top_p keeps reaches.

    All logits lighter than w together weigh at most min(sum, CHUNK * w) in each chunk. If that is
    less than 1 - top_p of the row, the threshold is not among them. The largest logit weighs 1, so
    this holds for (1 - top_p) / vocab_size.

    Args:
        sums: the sum of the weights of each chunk.
    """
    spare = (1 - top_p) * tl.sum(sums)
    low = (1 - top_p) / vocab_size
    high = 1.0
    for _ in range(_HALVINGS):
        middle = tl.sqrt(low * high)
        enough = tl.sum(tl.minimum(sums, CHUNK * middle)) < spare
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def _search(
    row, chunks, low, high, target, COUNT: tl.constexpr,
    NUM_CHUNKS: tl.constexpr, ALL_CHUNKS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return the largest key in [low, high] that enough logits reach.

    COUNT: at least `target` logits. Otherwise logits with at least the weight `target`.
    """
    while low < high:
        step = (high - low) // _PIVOTS + 1
        count = _list_candidates(chunks, low, NUM_CHUNKS, ALL_CHUNKS)
        sums = tl.zeros([_PIVOTS], tl.float64)
        for i in range(0, count, TILE):
            _, keys, weights = _load_tile(row, chunks, i, count, CHUNK, TILE)
            if COUNT:
                weights = 1.0
            sums += _pivot_sums(keys, weights, low, step)
        low, high = _narrow(low, high, step, sums, target)
    return low


@triton.jit
def _pivot_sums(keys, weights, low, step):
    """Return [_PIVOTS] float64, the weight of the keys that reach low, low + step and so on."""
    sums = tl.zeros([_PIVOTS], tl.float64)
    for i in range(_PIVOTS):  # not unrolled, because then the values would not fit into registers
        total = tl.sum(tl.where(keys >= low + i * step, weights, 0.0))
        sums = tl.where(tl.arange(0, _PIVOTS) == i, total.to(tl.float64), sums)
    return sums


@triton.jit
def _narrow(low, high, step, sums, target_sum):
    """Return new bounds: the last pivot that reaches `target_sum`, and the key before the next."""
    reached = (sums >= target_sum) & (tl.arange(0, _PIVOTS) > 0)
    low += tl.sum(reached.to(tl.uint32)) * step
    return low, tl.minimum(high, low + step - 1)


@triton.jit
def _sum_kept(
    row, chunks, threshold,
    NUM_CHUNKS: tl.constexpr, ALL_CHUNKS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Set the sum of each chunk to that of the weights of its logits that reach `threshold`."""
    count = _list_candidates(chunks, threshold, NUM_CHUNKS, ALL_CHUNKS)
    indices = tl.arange(0, ALL_CHUNKS)
    below = _load_chunk_keys(chunks, NUM_CHUNKS, ALL_CHUNKS) < threshold
    tl.store(chunks[2] + indices, 0.0, below & (indices < NUM_CHUNKS))
    for i in range(0, count, TILE):
        candidates, keys, weights = _load_tile(row, chunks, i, count, CHUNK, TILE)
        sums = tl.sum(tl.where(keys >= threshold, weights, 0.0), 1)
        tl.store(chunks[2] + candidates, sums, i + tl.arange(0, TILE) < count)
    tl.debug_barrier()  # threads read sums that other threads have stored


@triton.jit
def _load_chunk_keys(chunks, NUM_CHUNKS: tl.constexpr, ALL_CHUNKS: tl.constexpr):
    """Return [ALL_CHUNKS] uint32, the largest key of each chunk; 0 past the last chunk."""
    indices = tl.arange(0, ALL_CHUNKS)
    keys = tl.load(chunks[0] + indices, indices < NUM_CHUNKS, 0)
    return keys.to(tl.uint32, bitcast=True)


@triton.jit
def _list_candidates(chunks, low, NUM_CHUNKS: tl.constexpr, ALL_CHUNKS: tl.constexpr):
    """List the chunks whose largest key reaches `low`, in order; return their number."""
    indices = tl.arange(0, ALL_CHUNKS)
    mask = (_load_chunk_keys(chunks, NUM_CHUNKS, ALL_CHUNKS) >= low) & (indices < NUM_CHUNKS)
    places = tl.cumsum(mask.to(tl.int32)) - 1
    tl.debug_barrier()  # all threads have read the previous list
    tl.store(chunks[1] + places, indices, mask)
    tl.debug_barrier()  # no thread reads the new list before it is complete
    return tl.sum(mask.to(tl.int32))


@triton.jit
def _load_tile(row, chunks, first, count, CHUNK: tl.constexpr, TILE: tl.constexpr):
    """Return [TILE] candidates from `first` on, and [TILE, CHUNK] keys and weights of their logits.

    The keys past `count` are 0.
    """
    logits, vocab_size, largest, scale, min_p = row
    places = first + tl.arange(0, TILE)
    indices = tl.load(chunks[1] + places, places < count, 0)
    columns = indices[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    inside = (places < count)[:, None] & (columns < vocab_size)
    x = tl.load(logits + columns, inside, -float("inf"))
    return indices, tl.where(inside, sort_key(x), 0), weigh(x, largest, scale, min_p)
