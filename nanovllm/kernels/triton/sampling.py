"""The Triton kernels that turn logits into token ids, each row by its own rule.

A row's token depends on nothing but the row, no sum depends on the order in which programs run, and
nothing waits for the host, so a CUDA graph can hold every call. Imports triton: ask
`nanovllm.kernels` before this.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.triton.inverse_cdf import invert, uniform, weigh
from nanovllm.kernels.triton.top_k_top_p import choose_filtered, is_cut, key
from nanovllm.sampling_params import GREEDY_BELOW

_BLOCK = 2048
"""Logits that one program reduces."""
_CHUNK = 128
"""Logits that a search reads, or skips, together."""


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """Return the first of the largest logits of each row of [R, vocab_size]: [R] int64."""
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
    return _choose_tokens(logits, (temperatures, seeds, positions, top_ks, top_ps, min_ps))


def _choose_tokens(
    logits: torch.Tensor, parameters: tuple[torch.Tensor, ...] | None
) -> torch.Tensor:
    rows, vocab_size = logits.shape
    temperatures, seeds, positions, top_ks, top_ps, min_ps = parameters or (None,) * 6
    assert logits.stride(1) == 1
    block = min(triton.next_power_of_2(vocab_size), _BLOCK)
    num_blocks = triton.cdiv(vocab_size, block)
    chunk = min(block, _CHUNK)
    num_chunks = num_blocks * (block // chunk)
    maxima = logits.new_empty(rows, num_blocks, dtype=torch.float32)
    sums = torch.empty_like(maxima)
    firsts = torch.empty_like(maxima, dtype=torch.int32)
    chunk_keys = logits.new_empty(rows, num_chunks, dtype=torch.int32)
    tokens = logits.new_empty(rows, dtype=torch.int64)
    if rows == 0:
        return tokens
    _reduce_blocks[(rows, num_blocks)](
        logits, logits.stride(0), vocab_size, temperatures, top_ks, top_ps,
        maxima, sums, firsts, chunk_keys,
        GREEDY_BELOW=GREEDY_BELOW, BLOCK=block, CHUNK=chunk,
    )  # fmt: skip
    _choose[(rows,)](
        logits, logits.stride(0), vocab_size, temperatures, seeds, positions, top_ks, top_ps,
        min_ps, maxima, sums, firsts, tokens,
        GREEDY_BELOW=GREEDY_BELOW, BLOCK=block, NUM_BLOCKS=num_blocks,
        ALL_BLOCKS=triton.next_power_of_2(num_blocks),
    )  # fmt: skip
    if parameters is not None:
        choose_filtered(logits, parameters, maxima, chunk_keys, chunk, tokens)
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
        if is_cut(row, vocab_size, temperatures, top_ks, top_ps, GREEDY_BELOW):
            keys = tl.max(tl.reshape(key(logit), (BLOCK // CHUNK, CHUNK)), 1)
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
        cut = is_cut(row, vocab_size, temperatures, top_ks, top_ps, GREEDY_BELOW)
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
            number = uniform(tl.load(seeds + row), tl.load(positions + row))
            block, before = invert(mass, number * tl.sum(mass))
            share = number * tl.sum(mass) - before
            share /= tl.sum(tl.where(blocks == block, mass, 0.0))
            weights = _weights(logits, vocab_size, block, largest, scale, min_p, BLOCK)
            weights = weights.to(tl.float64)
            column, _ = invert(weights, share * tl.sum(weights))
            token = tl.minimum(block * BLOCK + column, vocab_size - 1)
    tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def _weights(logits, vocab_size, block, largest, scale, min_p, BLOCK: tl.constexpr):
    """Return the weights of one block of a row, 0 for what min_p leaves out."""
    columns = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + columns, columns < vocab_size, -float("inf"))
    return weigh(x, largest, scale, min_p)
