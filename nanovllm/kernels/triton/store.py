"""The Triton kernel that prepares queries, keys and values, and stores the latter two in the paged
KV cache: norms, rotation and the store in one pass.

A token's result does not depend on the rest of the batch.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.torch_math import NORM_ROUNDED
from nanovllm.kernels.triton.fp8 import to_fp8
from nanovllm.kernels.triton.launch import can_chain, join_chain, launch_options
from nanovllm.kernels.triton.online_softmax import block_stride
from nanovllm.kernels.triton.ops import times_weight

_HEADS = 8  # heads that one program processes
_FP8 = torch.float8_e4m3fn


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
    *,
    kind: int = NORM_ROUNDED,
    after_rotation: bool = False,
    interleaved: bool = False,
    v_norm: bool = False,
    q_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do what `Backend.store` says; all arguments but these are the fields of `QKNormRope`.

    Args:
        positions: [t] int64, rows of `cos_sin` and `q_scale`.
        slot_mapping: [t] int64. A token with a negative slot is not stored.
        kv_cache: in the layout of `PagedBackend`, in qkv's dtype or float8_e4m3fn. The latter has
            scale 1 and clamps to its largest magnitude, 448. Blocks may lie apart.
    """
    block_size, num_kv_heads, head_dim = kv_cache.shape[2:]
    parts = _parts_of(qkv, num_heads, num_kv_heads, head_dim)
    q = qkv.new_empty(len(qkv), num_heads, head_dim)
    stride = block_stride(kv_cache)
    half_block = triton.next_power_of_2(head_dim // 2)
    halves = len(kv_cache) if parts > 1 else 0
    heads = num_heads + halves * num_kv_heads
    grid = (len(qkv), triton.cdiv(heads, _HEADS))
    if grid[0]:
        _store[grid](
            qkv, q_weight, q_weight if k_weight is None else k_weight, eps,
            cos_sin, positions, slot_mapping, q, kv_cache, kv_cache.stride(0), q_scale,
            NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, PARTS=parts,
            HALVES=halves, HALF=head_dim // 2, HALF_ROTARY=cos_sin.shape[1] // 2,
            BLOCK_SIZE=block_size,
            BLOCK_STRIDE=None if stride == block_size * num_kv_heads * head_dim else stride,
            KIND=kind, NORM_AFTER=after_rotation, INTERLEAVED=interleaved, V_NORM=v_norm,
            HALF_BLOCK=half_block, HEADS=_HEADS,
            LIMIT=torch.finfo(_FP8).max if kv_cache.dtype == _FP8 else None,
            num_warps=max(half_block * _HEADS // 256, 1), **launch_options(can_chain(q.device)),
        )  # fmt: skip
    return q


def _parts_of(qkv: torch.Tensor, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """Return 3 if `qkv` holds q, k and v, 2 without v, and 1 for q alone."""
    parts, rest = divmod(
        qkv.shape[1] - (num_heads - num_kv_heads) * head_dim, num_kv_heads * head_dim
    )
    assert qkv.is_contiguous()
    assert 1 <= parts <= 3, "qkv is neither q, nor q and k, nor q, k and v"
    assert rest == 0, "qkv holds no whole heads"
    return parts


@triton.jit
def _store(
    qkv, q_weight, k_weight, eps, cos_sin, positions, slot_mapping, q, kv_cache, value_offset,
    q_scale,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, PARTS: tl.constexpr, HALVES: tl.constexpr,
    HALF: tl.constexpr, HALF_ROTARY: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, KIND: tl.constexpr, NORM_AFTER: tl.constexpr,
    INTERLEAVED: tl.constexpr, V_NORM: tl.constexpr, HALF_BLOCK: tl.constexpr, HEADS: tl.constexpr,
    LIMIT: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Process HEADS heads of one token: first those of q, then of k, then of v.

    A head is loaded as two halves, which rotation combines. If it rotates only the first numbers,
    the others are divided among the halves too. PARTS is what `_parts_of` returns; of keys and
    values HALVES are stored. `value_offset` is the distance between them, BLOCK_STRIDE that of
    blocks which lie apart, else None. LIMIT is the largest magnitude of an 8-bit cache, else None.
    """
    join_chain(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    position = tl.load(positions + token)
    # Broadcast to whole tiles, so that every tensor has the same register layout.
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    head, column = tl.broadcast(heads[:, None], tl.arange(0, HALF_BLOCK)[None, :])
    inside = (head < NUM_HEADS + HALVES * NUM_KV_HEADS) & (column < HALF)

    is_query = head < NUM_HEADS
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    first_at, second_at, rotates = _halves(column, HALF, HALF_ROTARY)
    first_from, second_from = first_at, second_at
    if INTERLEAVED:
        moves = rotates & (head < NUM_HEADS + NUM_KV_HEADS)
        first_from = tl.where(moves, 2 * column, first_at)
        second_from = tl.where(moves, 2 * column + 1, second_at)
    source_head = head
    if PARTS == 2:
        source_head = tl.where(is_value, head - NUM_KV_HEADS, head)
    source = qkv + (token * (NUM_HEADS + (PARTS - 1) * NUM_KV_HEADS) + source_head) * (2 * HALF)
    first = tl.load(source + first_from, inside, 0.0)
    second = tl.load(source + second_from, inside, 0.0)

    rotated_first, rotated_second = _norm_and_rotate(
        first, second, q_weight, k_weight, eps, cos_sin, position, column, is_query, inside,
        rotates, first_from, second_from, first_at, second_at,
        HALF, HALF_ROTARY, KIND, NORM_AFTER,
    )  # fmt: skip
    _store_query(
        q + (token * NUM_HEADS + head) * (2 * HALF), rotated_first, rotated_second,
        q_scale, position, first_at, second_at, inside & is_query,
    )  # fmt: skip
    if PARTS > 1:
        if V_NORM:
            first, second = _unit_norm(first, second, eps, HALF)
        first = tl.where(is_value, first, rotated_first)
        second = tl.where(is_value, second, rotated_second)
        offset = tl.where(is_value, value_offset - NUM_KV_HEADS * (2 * HALF), 0)
        _store_in_cache(
            kv_cache + offset, first, second, slot, head - NUM_HEADS, first_at, second_at,
            inside & (head >= NUM_HEADS) & (slot >= 0),
            NUM_KV_HEADS, HALF, BLOCK_SIZE, BLOCK_STRIDE, LIMIT,
        )  # fmt: skip


@triton.jit
def _norm_and_rotate(
    first, second, q_weight, k_weight, eps, cos_sin, position, column, is_query, inside, rotates,
    first_from, second_from, first_at, second_at,
    HALF: tl.constexpr, HALF_ROTARY: tl.constexpr, KIND: tl.constexpr, NORM_AFTER: tl.constexpr,
):  # fmt: skip
    """Return the halves of each head of q and k, normalised and rotated, in their dtype.

    `first_from` and `second_from` say where in a head they were, `first_at` and `second_at` where
    they go.
    """
    dtype = first.dtype
    rotated_first, rotated_second = first.to(tl.float32), second.to(tl.float32)
    if q_weight is not None and not NORM_AFTER:
        rotated_first, rotated_second = _rms_norm(
            first, second, q_weight, k_weight, is_query, first_from, second_from, inside, eps,
            HALF, KIND,
        )  # fmt: skip
    if HALF_ROTARY:
        angle = cos_sin + position * (2 * HALF_ROTARY) + column
        rotated_first, rotated_second = _rotate(
            rotated_first, rotated_second, angle, inside & rotates, HALF, HALF_ROTARY
        )
    rotated_first, rotated_second = rotated_first.to(dtype), rotated_second.to(dtype)
    if q_weight is not None and NORM_AFTER:
        rotated_first, rotated_second = _rms_norm(
            rotated_first, rotated_second, q_weight, k_weight, is_query, first_at, second_at,
            inside, eps, HALF, KIND,
        )  # fmt: skip
        rotated_first, rotated_second = rotated_first.to(dtype), rotated_second.to(dtype)
    return rotated_first, rotated_second


@triton.jit
def _store_query(target, first, second, q_scale, position, first_at, second_at, mask):
    """Store heads of q at `target`, multiplied by their position's factor if there is a q_scale."""
    if q_scale is not None:
        factor = tl.load(q_scale + position)
        dtype = first.dtype
        first = (first.to(tl.float32) * factor).to(dtype)
        second = (second.to(tl.float32) * factor).to(dtype)
    tl.store(target + first_at, first, mask)
    tl.store(target + second_at, second, mask)


@triton.jit
def _store_in_cache(
    cache, first, second, slot, kv_head, first_at, second_at, mask,
    NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Store heads of k or v in a slot of the cache."""
    if LIMIT is not None:
        first = to_fp8(first.to(tl.float32), LIMIT)
        second = to_fp8(second.to(tl.float32), LIMIT)
    if BLOCK_STRIDE is None:
        target = cache + (slot * NUM_KV_HEADS + kv_head) * (2 * HALF)
    else:
        head_place = slot % BLOCK_SIZE * NUM_KV_HEADS + kv_head
        target = cache + slot // BLOCK_SIZE * BLOCK_STRIDE + head_place * (2 * HALF)
    dtype = cache.dtype.element_ty
    tl.store(target + first_at, first.to(dtype), mask)
    tl.store(target + second_at, second.to(dtype), mask)


@triton.jit
def _halves(column, HALF: tl.constexpr, HALF_ROTARY: tl.constexpr):
    """Return the places of both halves' numbers in a head, and whether they are a rotated pair."""
    rotates = column < HALF_ROTARY
    first, second = column, column + HALF
    if HALF_ROTARY != HALF:
        first = tl.where(rotates, column, column + HALF_ROTARY)
        second = column + tl.where(rotates, HALF_ROTARY, HALF)
    return first, second, rotates


@triton.jit
def _scale_of(first, second, eps, HALF: tl.constexpr):
    """Return what RMSNorm multiplies each head with, of its float32 halves."""
    squares = tl.sum(first * first + second * second, 1, keep_dims=True)
    return tl.rsqrt(squares / (2 * HALF) + eps)


@triton.jit
def _unit_norm(first, second, eps, HALF: tl.constexpr):
    """Return the halves of the RMSNorm of each head without a weight, in their dtype."""
    wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
    scale = _scale_of(wide_first, wide_second, eps, HALF)
    return (wide_first * scale).to(first.dtype), (wide_second * scale).to(second.dtype)


@triton.jit
def _rms_norm(
    first, second, q_weight, k_weight, is_query, first_at, second_at, inside, eps,
    HALF: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Return the halves of the RMSNorm of each head, in float32, rounded to their dtype."""
    dtype = first.dtype
    wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
    scale = _scale_of(wide_first, wide_second, eps, HALF)
    query_first = tl.load(q_weight + first_at, inside, 0.0)
    query_second = tl.load(q_weight + second_at, inside, 0.0)
    key_first = tl.load(k_weight + first_at, inside, 0.0)
    key_second = tl.load(k_weight + second_at, inside, 0.0)
    factor_first = tl.where(is_query, query_first, key_first).to(tl.float32)
    factor_second = tl.where(is_query, query_second, key_second).to(tl.float32)
    normed_first = times_weight(wide_first * scale, factor_first, dtype, KIND)
    normed_second = times_weight(wide_second * scale, factor_second, dtype, KIND)
    return normed_first.to(tl.float32), normed_second.to(tl.float32)


@triton.jit
def _rotate(first, second, angle, mask, HALF: tl.constexpr, HALF_ROTARY: tl.constexpr):
    """Return the halves of each head, rotated; `angle` points to cosines, then sines."""
    cos = tl.load(angle, mask, 0.0 if HALF_ROTARY == HALF else 1.0)
    sin = tl.load(angle + HALF_ROTARY, mask, 0.0)
    return first * cos - second * sin, second * cos + first * sin
