"""The Triton kernels that turn logits into token ids, each row with its own parameters.

A row's token depends on that row only, and no sum depends on the order in which programs run. It is
-1 if the row is no distribution: if some logit is NaN or +inf, or all are -inf. The host never
waits for the device, so a CUDA graph can hold every call. Imports triton: check
`kernels.selector.triton_available` first.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.triton.inverse_cdf import invert, uniform, weigh
from nanovllm.kernels.triton.top_k_top_p import choose_filtered, is_filtered, sort_key
from nanovllm.sampling_params import GREEDY_BELOW

_BLOCK = 2048
"""Logits that one program reduces."""
_CHUNK = 128
"""Logits that the search for top_k and top_p reads, or skips, together."""


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """Return the index of the first largest logit of each row of [R, vocab_size]: [R] int64."""
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
    """Draw a token for each row, as `layers.sampler.draw` does in torch.

    The first kernel reduces each block of logits. The second kernel runs one program per row: it
    chooses a block with the row's uniform number, then a token in the block. The third kernel
    chooses the tokens of rows with top_k or top_p.

    Args:
        logits: [R, vocab_size], any float dtype; rows contiguous.
        temperatures: [R] float32; a row below GREEDY_BELOW is greedy.
        seeds: [R] int64.
        positions: [R] int64.
        top_ks: [R] int64, at least 1; vocab_size and above keep all tokens.
        top_ps: [R] float32 in [0, 1].
        min_ps: [R] float32. These six tensors must be contiguous.

    Returns:
        [R] int64.
    """
    return _choose_tokens(logits, (temperatures, seeds, positions, top_ks, top_ps, min_ps))


def _choose_tokens(
    logits: torch.Tensor, parameters: tuple[torch.Tensor, ...] | None
) -> torch.Tensor:
    """Launch the kernels: two if `parameters` is None and every row is greedy, else three."""
    rows, vocab_size = logits.shape
    temperatures, seeds, positions, top_ks, top_ps, min_ps = parameters or (None,) * 6
    assert logits.stride(1) == 1
    block = min(triton.next_power_of_2(vocab_size), _BLOCK)
    num_blocks = triton.cdiv(vocab_size, block)
    chunk = min(block, _CHUNK)
    num_chunks = num_blocks * (block // chunk)
    block_maxima = logits.new_empty(rows, num_blocks, dtype=torch.float32)
    block_sums = torch.empty_like(block_maxima)
    block_argmaxes = torch.empty_like(block_maxima, dtype=torch.int32)
    chunk_keys = logits.new_empty(rows, num_chunks, dtype=torch.int32)
    tokens = logits.new_empty(rows, dtype=torch.int64)
    if rows == 0:
        return tokens
    _reduce_blocks[(rows, num_blocks)](
        logits, logits.stride(0), vocab_size, temperatures, top_ks, top_ps,
        block_maxima, block_sums, block_argmaxes, chunk_keys,
        GREEDY_BELOW=GREEDY_BELOW, BLOCK=block, CHUNK=chunk,
    )  # fmt: skip
    _choose[(rows,)](
        logits, logits.stride(0), vocab_size, temperatures, seeds, positions, top_ks, top_ps,
        min_ps, block_maxima, block_sums, block_argmaxes, tokens,
        GREEDY_BELOW=GREEDY_BELOW, BLOCK=block, NUM_BLOCKS=num_blocks,
        ALL_BLOCKS=triton.next_power_of_2(num_blocks),
    )  # fmt: skip
    if parameters is not None:
        choose_filtered(logits, parameters, block_maxima, chunk_keys, chunk, tokens)
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
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(logits + row * stride + columns, columns < vocab_size, -float("inf"))
    x = logit.to(tl.float32)
    x = tl.where(x == x, x, float("inf"))
    largest, first = tl.max(x, 0, return_indices=True)
    place = row * tl.num_programs(1) + block
    tl.store(block_maxima + place, largest)
    tl.store(block_argmaxes + place, block * BLOCK + first)
    if temperatures is not None:
        scale = 1 / tl.maximum(tl.load(temperatures + row), GREEDY_BELOW)
        # In a block of -inf only, x - largest would be NaN.
        base = tl.where(largest > -float("inf"), largest, 0.0)
        tl.store(block_sums + place, tl.sum(tl.exp((x - base) * scale)))
        if is_filtered(row, vocab_size, temperatures, top_ks, top_ps, GREEDY_BELOW):
            keys = tl.max(tl.reshape(sort_key(logit), (BLOCK // CHUNK, CHUNK)), 1)
            chunks = place * (BLOCK // CHUNK) + tl.arange(0, BLOCK // CHUNK)
            tl.store(chunk_keys + chunks, keys.to(tl.int32, bitcast=True))


@triton.jit
def _choose(
    logits, stride, vocab_size, temperatures, seeds, positions, top_ks, top_ps, min_ps,
    block_maxima, block_sums, block_argmaxes, tokens,
    GREEDY_BELOW: tl.constexpr, BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr,
    ALL_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Choose the token of one row: the block, then the token, where the sum passes a random share.

    A row with top_k or top_p gets its first largest token here; `choose_filtered` replaces it. A
    row whose largest logit is not finite gets -1.
    """
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, ALL_BLOCKS)
    place = row * NUM_BLOCKS + blocks
    maxima = tl.load(block_maxima + place, blocks < NUM_BLOCKS, -float("inf"))
    largest, block = tl.max(maxima, 0, return_indices=True)
    token = tl.load(block_argmaxes + row * NUM_BLOCKS + block)
    if temperatures is not None:
        temperature = tl.load(temperatures + row)
        filtered = is_filtered(row, vocab_size, temperatures, top_ks, top_ps, GREEDY_BELOW)
        if (temperature >= GREEDY_BELOW) & ~filtered:
            logits += row * stride
            scale = 1 / temperature
            min_p = tl.load(min_ps + row)
            mass = tl.load(block_sums + place, blocks < NUM_BLOCKS, 0.0)
            mass *= tl.exp((maxima - largest) * scale)
            if min_p > 0:  # relative to the row's largest weight, so sum the blocks again
                for i in range(NUM_BLOCKS):
                    weights = _block_weights(logits, vocab_size, i, largest, scale, min_p, BLOCK)
                    mass = tl.where(blocks == i, tl.sum(weights), mass)
            mass = mass.to(tl.float64)
            number = uniform(tl.load(seeds + row), tl.load(positions + row))
            block, before = invert(mass, number * tl.sum(mass))
            share = number * tl.sum(mass) - before
            share /= tl.sum(tl.where(blocks == block, mass, 0.0))
            weights = _block_weights(logits, vocab_size, block, largest, scale, min_p, BLOCK)
            weights = weights.to(tl.float64)
            column, _ = invert(weights, share * tl.sum(weights))
            token = tl.minimum(block * BLOCK + column, vocab_size - 1)
    token = tl.where(tl.abs(largest) < float("inf"), token, -1)
    tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def _block_weights(logits, vocab_size, block, largest, scale, min_p, BLOCK: tl.constexpr):
    """Return [BLOCK] float32, the weights of one block of a row; see `weigh`."""
    columns = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + columns, columns < vocab_size, -float("inf"))
    return weigh(x, largest, scale, min_p)
