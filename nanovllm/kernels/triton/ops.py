"""The Triton kernels that layers call: norm, activation, and the store into the KV cache.

The result for a row or token does not depend on the rest of the batch. The host never waits for the
device, so a CUDA graph can hold every call. Imports triton: check
`kernels.selector.triton_available` first.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.triton.fp8 import to_fp8

_HEADS = 8
"""Heads that one program of `store` processes."""
_FP8 = torch.float8_e4m3fn


def add_rms_norm(
    x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add `x`, if given, to `residual` in place, and return the RMSNorm of `residual`.

    Rows must be contiguous.
    """
    out = torch.empty_like(residual)
    size = residual.shape[-1]
    block = triton.next_power_of_2(size)
    num_warps = min(max(block // 256, 1), 16)
    grid = (residual.numel() // size,)
    if grid[0]:
        _add_rms_norm[grid](x, residual, weight, out, size, eps, BLOCK=block, num_warps=num_warps)
    return out


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(first half) * second half of each row of gate_up [t, 2n], which is contiguous."""
    rows, width = gate_up.shape
    size = width // 2
    out = gate_up.new_empty(rows, size)
    block = min(triton.next_power_of_2(size), 1024)
    if rows:
        _silu_and_mul[(rows, triton.cdiv(size, block))](gate_up, out, size, BLOCK=block)
    return out


def store(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
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
        q_weight, k_weight: [dim], of the RMSNorms; None for both: no norm, only the rotation.
        cos_sin: [positions, dim] float32.
        positions: [t] int64.
        slot_mapping: [t] int64. A token with a negative slot is not stored.
        kv_cache: [2, blocks, block_size, kv_heads, dim], contiguous, in qkv's dtype or
            float8_e4m3fn. The latter has scale 1 and clamps to its largest magnitude, 448.
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


@triton.jit
def _add_rms_norm(x, residual, weight, out, size, eps, BLOCK: tl.constexpr):
    """Process one row. Like layers.layernorm, round the sum, the normalised row and the product."""
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
    """Process one block of a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    dtype = out.dtype.element_ty
    gate = tl.load(gate_up + row * 2 * size + columns, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + columns, inside, 0.0).to(tl.float32)
    activated = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    tl.store(out + row * size + columns, (activated * up).to(dtype), inside)


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
    """Process HEADS heads of one token. The heads of q come first, then those of k, then of v.

    A head is loaded as two halves, because rotation combines them. `value_offset` is the distance
    from keys to values in the cache, LIMIT the largest magnitude of an 8-bit cache, else None.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    # Broadcast to whole tiles, also for values that all heads share, so that every tensor has the
    # same register layout.
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    head, column = tl.broadcast(heads[:, None], tl.arange(0, HALF_BLOCK)[None, :])
    inside = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & (column < HALF)
    dtype = q.dtype.element_ty

    is_query = head < NUM_HEADS
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    source = qkv + (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * (2 * HALF) + column
    first, second = tl.load(source, inside, 0.0), tl.load(source + HALF, inside, 0.0)

    normed_first, normed_second = first.to(tl.float32), second.to(tl.float32)
    if q_weight is not None:
        normed_first, normed_second = _rms_norm(
            first, second, q_weight, k_weight, is_query, column, inside, eps, HALF
        )
    angle = cos_sin + tl.load(positions + token) * (2 * HALF) + column
    rotated_first, rotated_second = _rotate(normed_first, normed_second, angle, inside, dtype, HALF)

    target = q + (token * NUM_HEADS + head) * (2 * HALF) + column
    tl.store(target, rotated_first, inside & is_query)
    tl.store(target + HALF, rotated_second, inside & is_query)

    first = tl.where(is_value, first, rotated_first)
    second = tl.where(is_value, second, rotated_second)
    if LIMIT is not None:
        first = to_fp8(first.to(tl.float32), LIMIT)
        second = to_fp8(second.to(tl.float32), LIMIT)
    kv_head = head - NUM_HEADS
    offset = tl.where(is_value, value_offset - NUM_KV_HEADS * (2 * HALF), 0)
    target = kv_cache + offset + (slot * NUM_KV_HEADS + kv_head) * (2 * HALF) + column
    kept = inside & (head >= NUM_HEADS) & (slot >= 0)
    tl.store(target, first.to(kv_cache.dtype.element_ty), kept)
    tl.store(target + HALF, second.to(kv_cache.dtype.element_ty), kept)


@triton.jit
def _rms_norm(first, second, q_weight, k_weight, is_query, column, inside, eps, HALF: tl.constexpr):
    """Return the halves of the RMSNorm of each head, in float32.

    The values are rounded to the dtype of `first` after the norm and after the weight, as the
    layers do.
    """
    dtype = first.dtype
    wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
    squares = tl.sum(wide_first * wide_first + wide_second * wide_second, 1, keep_dims=True)
    scale = tl.rsqrt(squares / (2 * HALF) + eps)
    query_first = tl.load(q_weight + column, inside, 0.0)
    query_second = tl.load(q_weight + HALF + column, inside, 0.0)
    key_first = tl.load(k_weight + column, inside, 0.0)
    key_second = tl.load(k_weight + HALF + column, inside, 0.0)
    factor_first = tl.where(is_query, query_first, key_first).to(tl.float32)
    factor_second = tl.where(is_query, query_second, key_second).to(tl.float32)
    normed_first = (wide_first * scale).to(dtype).to(tl.float32)
    normed_second = (wide_second * scale).to(dtype).to(tl.float32)
    normed_first = (normed_first * factor_first).to(dtype).to(tl.float32)
    normed_second = (normed_second * factor_second).to(dtype).to(tl.float32)
    return normed_first, normed_second


@triton.jit
def _rotate(first, second, angle, inside, dtype: tl.constexpr, HALF: tl.constexpr):
    """Return the halves of each head, rotated; `angle` points to cosines, then HALF sines."""
    cos, sin = tl.load(angle, inside, 0.0), tl.load(angle + HALF, inside, 0.0)
    rotated_first = (first * cos - second * sin).to(dtype)
    rotated_second = (second * cos + first * sin).to(dtype)
    return rotated_first, rotated_second
