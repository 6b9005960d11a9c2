"""The Triton kernels that turn logits into token ids, each row with its own parameters.

A row's token depends on that row only, and no sum depends on the order in which programs run. It is
-1 if the row is not a distribution: if some logit is NaN or +inf, or all are -inf. The host never
waits for the device, so a CUDA graph can hold every call. Imports triton: check
`platform.cuda.triton_available` first.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.triton.top_k_top_p import (
    find_threshold,
    has_filter,
    invert,
    sort_key,
    uniform,
    weigh,
)
from nanovllm.options.sampling_params import GREEDY_BELOW

_BLOCK = 2048  # logits that one program reduces
_CHUNK = 128  # logits that the search for top_k and top_p reads, or skips, together
_TILE = 32  # chunks that the search reads at once


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """Do what `Kernels.greedy` says."""
    return _choose_tokens(logits, None)


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
) -> torch.Tensor:
    """Do what `Kernels.sample` says.

    The first kernel reduces each block of logits. The second weighs the chunks of rows whose
    weights depend on the row's largest logit or on its total weight. The third runs one program per
    row: it chooses a block or a chunk with the row's uniform number, then a token in it.

    Args:
        logits: any float dtype; rows contiguous.
        temperatures: a row below GREEDY_BELOW is greedy.
        top_ks: at least 1; vocab_size and above keep all tokens.
    """
    return _choose_tokens(logits, (temperatures, seeds, positions, top_ks, top_ps, min_ps))


def _choose_tokens(
    logits: torch.Tensor, parameters: tuple[torch.Tensor, ...] | None
) -> torch.Tensor:
    """Launch the kernels: two if `parameters` is None and every row is greedy, otherwise three."""
    rows, vocab_size = logits.shape
    temperatures, seeds, positions, top_ks, top_ps, min_ps = parameters or (None,) * 6
    assert logits.stride(1) == 1
    block = min(triton.next_power_of_2(vocab_size), _BLOCK)
    num_blocks = triton.cdiv(vocab_size, block)
    chunk = min(block, _CHUNK)
    num_chunks = num_blocks * (block // chunk)
    all_blocks, all_chunks = map(triton.next_power_of_2, (num_blocks, num_chunks))
    block_maxima = logits.new_empty(rows, num_blocks, dtype=torch.float32)
    block_sums = torch.empty_like(block_maxima)
    block_argmaxes = torch.empty_like(block_maxima, dtype=torch.int32)
    chunk_keys = logits.new_empty(rows, num_chunks, dtype=torch.int32)
    chunk_sums = torch.empty_like(chunk_keys, dtype=torch.float32)
    tokens = logits.new_empty(rows, dtype=torch.int64)
    if rows == 0:
        return tokens
    _reduce_blocks[(rows, num_blocks)](
        logits, logits.stride(0), vocab_size, temperatures, top_ks, top_ps,
        block_maxima, block_sums, block_argmaxes, chunk_keys,
        GREEDY_BELOW=GREEDY_BELOW, BLOCK=block, CHUNK=chunk,
    )  # fmt: skip
    if parameters is not None:
        _weigh_chunks[(rows, num_blocks)](
            logits, logits.stride(0), vocab_size, temperatures, top_ks, top_ps, min_ps,
            block_maxima, chunk_sums,
            GREEDY_BELOW=GREEDY_BELOW, BLOCK=block, CHUNK=chunk, NUM_BLOCKS=num_blocks,
            ALL_BLOCKS=all_blocks,
        )  # fmt: skip
    _choose[(rows,)](
        logits, logits.stride(0), vocab_size, temperatures, seeds, positions, top_ks, top_ps,
        min_ps, block_maxima, block_sums, block_argmaxes,
        chunk_keys, torch.empty_like(chunk_keys), chunk_sums, tokens,
        GREEDY_BELOW=GREEDY_BELOW, BLOCK=block, NUM_BLOCKS=num_blocks, ALL_BLOCKS=all_blocks,
        CHUNK=chunk, NUM_CHUNKS=num_chunks, ALL_CHUNKS=all_chunks, TILE=min(all_chunks, _TILE),
        num_warps=4 if parameters is None else 8,
    )  # fmt: skip
    return tokens


@triton.jit
def _reduce_blocks(
    logits, stride, vocab_size, temperatures, top_ks, top_ps,
    block_maxima, block_sums, block_argmaxes, chunk_keys,
    GREEDY_BELOW: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Reduce one block of a row to its largest logit, the index of the first one, and a sum.

    NaN counts as +inf, so that the largest logit tells `_choose`. The sum is that of the weights
    relative to the largest logit, without min_p. In a row with top_k or top_p, also store the
    largest key of each chunk.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(logits + row * stride + columns, columns < vocab_size, -float("inf"))
    x = logit.to(tl.float32)
    x = tl.where(x == x, x, float("inf"))
    largest, first = tl.max(x, 0, return_indices=True)
    place = row * tl.num_programs(1) + block
    tl.store(block_maxima + place, largest)
    tl.store(block_argmaxes + place, block * BLOCK + first)
    if temperatures is not None:
        temperature = tl.load(temperatures + row)
        scale = 1 / tl.maximum(temperature, GREEDY_BELOW)
        # In a block of -inf only, x - largest would be NaN.
        base = tl.where(largest > -float("inf"), largest, 0.0)
        tl.store(block_sums + place, tl.sum(tl.exp((x - base) * scale)))
        top_k = tl.load(top_ks + row)
        top_p = tl.load(top_ps + row)
        if (temperature >= GREEDY_BELOW) & has_filter(vocab_size, top_k, top_p):
            keys = tl.max(tl.reshape(sort_key(logit), (BLOCK // CHUNK, CHUNK)), 1)
            chunks = place * (BLOCK // CHUNK) + tl.arange(0, BLOCK // CHUNK)
            tl.store(chunk_keys + chunks, keys.to(tl.int32, bitcast=True))


@triton.jit
def _weigh_chunks(
    logits, stride, vocab_size, temperatures, top_ks, top_ps, min_ps, block_maxima, chunk_sums,
    GREEDY_BELOW: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr, ALL_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Sum the weights of each chunk of one block, in a row with min_p or top_p and without top_k.

    The weights are relative to the row's largest logit, which `_reduce_blocks` has left in memory.
    A row with top_k keeps few chunks; `find_threshold` sums those.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    min_p = tl.load(min_ps + row)
    needed = (min_p > 0) | (tl.load(top_ps + row) < 1)
    needed &= (temperature >= GREEDY_BELOW) & (tl.load(top_ks + row) >= vocab_size)
    if needed:
        blocks = tl.arange(0, ALL_BLOCKS)
        places = row * NUM_BLOCKS + blocks
        largest = tl.max(tl.load(block_maxima + places, blocks < NUM_BLOCKS, -float("inf")))
        columns = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + columns, columns < vocab_size, -float("inf"))
        weights = weigh(x, largest, 1 / temperature, min_p)
        sums = tl.sum(tl.reshape(weights, (BLOCK // CHUNK, CHUNK)), 1)
        chunks = (row * NUM_BLOCKS + block) * (BLOCK // CHUNK) + tl.arange(0, BLOCK // CHUNK)
        tl.store(chunk_sums + chunks, sums)


@triton.jit
def _choose(
    logits, stride, vocab_size, temperatures, seeds, positions, top_ks, top_ps, min_ps,
    block_maxima, block_sums, block_argmaxes, chunk_keys, candidates, chunk_sums, tokens,
    GREEDY_BELOW: tl.constexpr, BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr,
    ALL_BLOCKS: tl.constexpr, CHUNK: tl.constexpr, NUM_CHUNKS: tl.constexpr,
    ALL_CHUNKS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Choose the token of one row. A row whose largest logit is not finite gets -1.

    ALL_BLOCKS and ALL_CHUNKS are NUM_BLOCKS and NUM_CHUNKS rounded up to a power of two.
    """
    index = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, ALL_BLOCKS)
    places = index * NUM_BLOCKS + blocks
    maxima = tl.load(block_maxima + places, blocks < NUM_BLOCKS, -float("inf"))
    largest, block = tl.max(maxima, 0, return_indices=True)
    is_distribution = tl.abs(largest) < float("inf")
    token = tl.load(block_argmaxes + index * NUM_BLOCKS + block)
    if temperatures is not None:
        temperature = tl.load(temperatures + index)
        if (temperature >= GREEDY_BELOW) & is_distribution:
            scale = 1 / temperature
            min_p = tl.load(min_ps + index)
            row = (logits + index * stride, vocab_size, largest, scale, min_p)
            top_k = tl.load(top_ks + index)
            top_p = tl.load(top_ps + index)
            number = uniform(tl.load(seeds + index), tl.load(positions + index))
            first = index * NUM_CHUNKS
            threshold = tl.full((), 0, tl.uint32)
            if has_filter(vocab_size, top_k, top_p) | (min_p > 0):
                if has_filter(vocab_size, top_k, top_p):
                    chunks = (chunk_keys + first, candidates + first, chunk_sums + first)
                    threshold = find_threshold(
                        row, chunks, top_k, top_p, NUM_CHUNKS, ALL_CHUNKS, CHUNK, TILE
                    )
                indices = tl.arange(0, ALL_CHUNKS)
                sums = tl.load(chunk_sums + first + indices, indices < NUM_CHUNKS, 0.0)
                token = _draw(row, sums, threshold, number, CHUNK)
            else:
                mass = tl.load(block_sums + places, blocks < NUM_BLOCKS, 0.0)
                mass *= tl.exp((maxima - largest) * scale)
                token = _draw(row, mass, threshold, number, BLOCK)
    token = tl.where(is_distribution, token, -1)
    tl.store(tokens + index, token.to(tl.int64))


@triton.jit
def _draw(row, mass, threshold, number, SIZE: tl.constexpr):
    """Return the token at which the sum of the kept weights exceeds `number` times their total.

    Find the part of the row first, then the token in it.

    Args:
        row: see `find_threshold`.
        mass: the sum of the kept weights of each part of SIZE logits.
        threshold: the key of the smallest logit that top_k and top_p keep.
    """
    logits, vocab_size, largest, scale, min_p = row
    mass = mass.to(tl.float64)
    part, before = invert(mass, number * tl.sum(mass))
    share = number * tl.sum(mass) - before
    share /= tl.sum(tl.where(tl.arange(0, mass.shape[0]) == part, mass, 0.0))
    columns = part * SIZE + tl.arange(0, SIZE)
    x = tl.load(logits + columns, columns < vocab_size, -float("inf"))
    weights = tl.where(sort_key(x) >= threshold, weigh(x, largest, scale, min_p), 0.0)
    weights = weights.to(tl.float64)
    column, _ = invert(weights, share * tl.sum(weights))
    return tl.minimum(part * SIZE + column, vocab_size - 1)
