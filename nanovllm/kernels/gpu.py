"""The Triton kernels for CUDA, but attention: norm, activation, KV store, FP8 and sampling.

Each row or token is computed in the same way whatever else is in the batch. Nothing waits for the
host, so a CUDA graph can hold every call. Imports triton: ask `nanovllm.kernels` before this.
"""

import torch
import triton
import triton.language as tl

from nanovllm.sampling_params import GREEDY_BELOW

_HEADS = 8
"""Heads that one program of the KV store takes."""
_FP8 = torch.float8_e4m3fn


def add_rms_norm(
    x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add `x` to `residual` in place (if given) and return its RMSNorm; rows contiguous."""
    out = torch.empty_like(residual)
    size = residual.shape[-1]
    block = triton.next_power_of_2(size)
    num_warps = min(max(block // 256, 1), 16)
    grid = (residual.numel() // size,)
    if grid[0]:
        _add_rms_norm[grid](x, residual, weight, out, size, eps, BLOCK=block, num_warps=num_warps)
    return out


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu of the first half of each row times the second; gate_up [t, 2n] contiguous."""
    rows, width = gate_up.shape
    size = width // 2
    out = gate_up.new_empty(rows, size)
    block = min(triton.next_power_of_2(size), 1024)
    if rows:
        _silu_and_mul[(rows, triton.cdiv(size, block))](gate_up, out, size, BLOCK=block)
    return out


def quantize_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round x [t, n] to float8_e4m3fn [t, n] times float32 scales [t, 1], each of its row alone."""
    assert x.is_contiguous()
    rows, size = x.shape
    values, scales = torch.empty_like(x, dtype=_FP8), x.new_empty(rows, 1, dtype=torch.float32)
    block = min(triton.next_power_of_2(size), 4096)
    if rows:
        _quantize_fp8[(rows,)](
            x,
            values,
            scales,
            LIMIT=torch.finfo(_FP8).max,
            SIZE=size,
            BLOCK=block,
            num_warps=max(block // 512, 1),
        )
    return values, scales


def store(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    num_heads: int,
) -> torch.Tensor:
    """Normalise and rotate q and k, store k and v in the cache, and return q [t, heads, dim].

    Args:
        qkv: [t, (heads + 2 kv_heads) * dim], contiguous.
        cos_sin: [positions, dim] float32.
        positions: [t] int64.
        slot_mapping: [t] int64; a token whose slot is negative is not stored.
        kv_cache: [2, blocks, block_size, kv_heads, dim], contiguous; qkv's dtype, or
            float8_e4m3fn at scale 1, where what is too large becomes the largest number.
    """
    num_kv_heads, head_dim = kv_cache.shape[-2:]
    assert qkv.is_contiguous()
    assert kv_cache.is_contiguous()
    q = qkv.new_empty(len(qkv), num_heads, head_dim)
    half_block = triton.next_power_of_2(head_dim // 2)
    grid = (len(qkv), triton.cdiv(num_heads + 2 * num_kv_heads, _HEADS))
    if grid[0]:
        _store[grid](
            qkv,
            q_weight,
            k_weight,
            eps,
            cos_sin,
            positions,
            slot_mapping,
            q,
            kv_cache,
            kv_cache.numel() // 2,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HALF=head_dim // 2,
            HALF_BLOCK=half_block,
            HEADS=_HEADS,
            LIMIT=torch.finfo(_FP8).max if kv_cache.dtype == _FP8 else None,
            num_warps=max(half_block * _HEADS // 256, 1),
        )
    return q


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """Return the first of the largest logits of each row of [R, vocab_size]: [R] int64."""
    return _choose_tokens(logits, None, None, None, None)


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    min_ps: torch.Tensor,
) -> torch.Tensor:
    """Draw a token for each row as `layers.sampler.draw` does without top_k and top_p.

    The logits are read once, by as many programs as there are blocks in them; then one program for
    each row finds the block and the token.

    Args:
        logits: [R, vocab_size], any float dtype; rows contiguous.
        temperatures: [R] float32; a row below GREEDY_BELOW takes the first of its largest logits.
        seeds: [R] int64.
        positions: [R] int64.
        min_ps: [R] float32; this and the three above contiguous.

    Returns:
        [R] int64.
    """
    return _choose_tokens(logits, temperatures, seeds, positions, min_ps)


def _choose_tokens(
    logits: torch.Tensor,
    temperatures: torch.Tensor | None,
    seeds: torch.Tensor | None,
    positions: torch.Tensor | None,
    min_ps: torch.Tensor | None,
) -> torch.Tensor:
    rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    block = min(triton.next_power_of_2(vocab_size), 2048)
    num_blocks = triton.cdiv(vocab_size, block)
    maxima = logits.new_empty(rows, num_blocks, dtype=torch.float32)
    sums = torch.empty_like(maxima)
    firsts = torch.empty_like(maxima, dtype=torch.int32)
    tokens = logits.new_empty(rows, dtype=torch.int64)
    if rows == 0:
        return tokens
    _reduce_blocks[(rows, num_blocks)](
        logits,
        logits.stride(0),
        vocab_size,
        temperatures,
        maxima,
        sums,
        firsts,
        GREEDY_BELOW=GREEDY_BELOW,
        BLOCK=block,
    )
    _choose[(rows,)](
        logits,
        logits.stride(0),
        vocab_size,
        temperatures,
        seeds,
        positions,
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
    return tokens


@triton.jit
def _add_rms_norm(x, residual, weight, out, size, eps, BLOCK: tl.constexpr):
    """One row. Rounds as layers.layernorm does: the sum, the normalised row, the product."""
    row = tl.program_id(0).to(tl.int64) * size
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    dtype = residual.dtype.element_ty
    wide = tl.load(residual + row + columns, inside, 0.0).to(tl.float32)
    if x is not None:
        wide += tl.load(x + row + columns, inside, 0.0).to(tl.float32)
        total = wide.to(dtype)
        tl.store(residual + row + columns, total, inside)
        wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / size + eps)
    normed = (wide * scale).to(dtype).to(tl.float32)
    factors = tl.load(weight + columns, inside, 0.0).to(tl.float32)
    tl.store(out + row + columns, (normed * factors).to(dtype), inside)


@triton.jit
def _silu_and_mul(gate_up, out, size, BLOCK: tl.constexpr):
    """A block of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    dtype = out.dtype.element_ty
    gate = tl.load(gate_up + row * 2 * size + columns, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + columns, inside, 0.0).to(tl.float32)
    activated = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    tl.store(out + row * size + columns, (activated * up).to(dtype), inside)


@triton.jit
def _quantize_fp8(
    x, values, scales, LIMIT: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One row, read twice: for its largest number, then to be divided by the scale."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, SIZE, BLOCK):
        part = tl.load(x + row * SIZE + start + columns, start + columns < SIZE, 0.0)
        largest = tl.maximum(largest, tl.abs(part.to(tl.float32)))
    scale = tl.max(largest) / LIMIT
    scale = tl.where(scale > 0, scale, 1.0)
    tl.store(scales + row, scale)
    for start in range(0, SIZE, BLOCK):
        inside = start + columns < SIZE
        part = tl.load(x + row * SIZE + start + columns, inside, 0.0).to(tl.float32)
        part = tl.clamp(part / scale, -LIMIT, LIMIT)
        tl.store(values + row * SIZE + start + columns, part.to(values.dtype.element_ty), inside)


@triton.jit
def _store(
    qkv,
    q_weight,
    k_weight,
    eps,
    cos_sin,
    positions,
    slot_mapping,
    q,
    kv_cache,
    value_offset,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """HEADS heads of one token: queries, then keys, then values; two halves of each, to rotate."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    # Whole tiles, for the rows that all heads share as well: so all have one layout in registers.
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    head, column = tl.broadcast(heads[:, None], tl.arange(0, HALF_BLOCK)[None, :])
    inside = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & (column < HALF)
    dtype = q.dtype.element_ty

    is_query = head < NUM_HEADS
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    source = qkv + (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * (2 * HALF) + column
    first, second = tl.load(source, inside, 0.0), tl.load(source + HALF, inside, 0.0)

    wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
    squares = tl.sum(wide_first * wide_first + wide_second * wide_second, 1, keep_dims=True)
    scale = tl.rsqrt(squares / (2 * HALF) + eps)
    query_first = tl.load(q_weight + column, inside, 0.0)
    query_second = tl.load(q_weight + HALF + column, inside, 0.0)
    key_first = tl.load(k_weight + column, inside, 0.0)
    key_second = tl.load(k_weight + HALF + column, inside, 0.0)
    factor_first = tl.where(is_query, query_first, key_first).to(tl.float32)
    factor_second = tl.where(is_query, query_second, key_second).to(tl.float32)
    # Rounded as the layers round: after the norm, after the weight, after the rotation.
    normed_first = (wide_first * scale).to(dtype).to(tl.float32)
    normed_second = (wide_second * scale).to(dtype).to(tl.float32)
    normed_first = (normed_first * factor_first).to(dtype).to(tl.float32)
    normed_second = (normed_second * factor_second).to(dtype).to(tl.float32)

    angle = cos_sin + tl.load(positions + token) * (2 * HALF) + column
    cos, sin = tl.load(angle, inside, 0.0), tl.load(angle + HALF, inside, 0.0)
    rotated_first = (normed_first * cos - normed_second * sin).to(dtype)
    rotated_second = (normed_second * cos + normed_first * sin).to(dtype)

    target = q + (token * NUM_HEADS + head) * (2 * HALF) + column
    tl.store(target, rotated_first, inside & is_query)
    tl.store(target + HALF, rotated_second, inside & is_query)

    first = tl.where(is_value, first, rotated_first)
    second = tl.where(is_value, second, rotated_second)
    if LIMIT is not None:
        first = tl.clamp(first.to(tl.float32), -LIMIT, LIMIT)
        second = tl.clamp(second.to(tl.float32), -LIMIT, LIMIT)
    kv_head = head - NUM_HEADS
    offset = tl.where(is_value, value_offset - NUM_KV_HEADS * (2 * HALF), 0)
    target = kv_cache + offset + (slot * NUM_KV_HEADS + kv_head) * (2 * HALF) + column
    kept = inside & (head >= NUM_HEADS) & (slot >= 0)
    tl.store(target, first.to(kv_cache.dtype.element_ty), kept)
    tl.store(target + HALF, second.to(kv_cache.dtype.element_ty), kept)


@triton.jit
def _reduce_blocks(
    logits,
    stride,
    vocab_size,
    temperatures,
    maxima,
    sums,
    firsts,
    GREEDY_BELOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of one row: its largest logit, where it first is, and the sum of the weights,
    relative to that largest one.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + columns, columns < vocab_size, -float("inf"))
    x = x.to(tl.float32)
    largest, first = tl.max(x, 0, return_indices=True)
    place = row * tl.num_programs(1) + block
    tl.store(maxima + place, largest)
    tl.store(firsts + place, block * BLOCK + first)
    if temperatures is not None:
        scale = 1 / tl.maximum(tl.load(temperatures + row), GREEDY_BELOW)
        # Where all of a block is forbidden, its weights are exp(-inf), not exp(-inf + inf).
        base = tl.where(largest > -float("inf"), largest, 0.0)
        tl.store(sums + place, tl.sum(tl.exp((x - base) * scale)))


@triton.jit
def _choose(
    logits,
    stride,
    vocab_size,
    temperatures,
    seeds,
    positions,
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
    """One row: find the block, then the token, where the weights' sum passes a uniform number."""
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, ALL_BLOCKS)
    place = row * NUM_BLOCKS + blocks
    block_maxima = tl.load(maxima + place, blocks < NUM_BLOCKS, -float("inf"))
    largest, block = tl.max(block_maxima, 0, return_indices=True)
    token = tl.load(firsts + row * NUM_BLOCKS + block)
    if temperatures is not None:
        temperature = tl.load(temperatures + row)
        if temperature >= GREEDY_BELOW:
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
def _weights(logits, vocab_size, block, largest, scale, min_p, BLOCK: tl.constexpr):
    """Return the weights of one block of a row, 0 for what min_p leaves out."""
    columns = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + columns, columns < vocab_size, -float("inf")).to(tl.float32)
    weights = tl.exp((x - largest) * scale)
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
