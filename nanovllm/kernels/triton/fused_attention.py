"""Decode attention in one Triton launch from the projections of q, k and v: norm, rotation, the
store into the cache, and the attention of a few rows of one token.

Rows may be tokens of one sequence. Its new keys and values are then read from the projections,
because nothing says when another program has stored them. The cache is that of `decode_attention`.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.triton.launch import launch_options, let_next_begin, wait_for_previous
from nanovllm.kernels.triton.online_softmax import LOG2_E, MAX_SPLITS, block_ids, finish_split

_WARPS = 4
"""Warps of a program. Each attends to some keys of a tile: 16, as many as an instruction of the
tensor cores takes."""
_NEW_KEYS = 16
"""Rows whose keys a row may see, as a tile: what `tl.dot` sums up has 16 numbers at least."""
_PROGRAMS = 512
"""Programs of a launch, at most: two turns of a large GPU. More would often have no split."""
_MERGED_AT_ONCE = tl.constexpr(12)
"""Splits whose results are loaded at once: all of a row of 700 tokens."""
_MAX_SPLITS = tl.constexpr(MAX_SPLITS)


def attend_rows(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    angle_rows: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_tables: torch.Tensor,
    kv_cache: torch.Tensor,
    num_heads: int,
    splits_done: torch.Tensor,
    *,
    chained: bool,
) -> torch.Tensor:
    """Do what `store.store` does, then attend as `decode_attention.decode` does.

    A row sees the keys in the cache and those of the rows that share its sequence, up to its own
    position. These rows must have consecutive positions. A row's splits follow from the number of
    its keys in the cache, never from the batch; the other keys are one split more.

    Args:
        qkv: [R, (heads + 2 kv_heads) * dim], R at most `fused_layer.MAX_ROWS`.
        q_weight, k_weight, eps, cos_sin, slot_mapping: see `store.store`.
        angle_rows: [R] int64, rows of `cos_sin`.
        kv_cache: of `qkv`'s dtype.
        splits_done: [R or more, num_kv_heads] int32, 0 between two launches, which must run one
            after another.
        chained: see `launch.launch_options`.

    Returns:
        [R, num_heads, head_dim].
    """
    assert qkv.is_contiguous()
    assert kv_cache.is_contiguous()
    rows = len(qkv)
    block_size, num_kv_heads, head_dim = kv_cache.shape[2:]
    group = num_heads // num_kv_heads
    k_cache, v_cache = kv_cache.unbind()
    out = qkv.new_empty(rows, num_heads, head_dim)
    per_head = rows, MAX_SPLITS, num_heads
    partial_out = qkv.new_empty(*per_head, head_dim, dtype=torch.float32)
    partial_stats = qkv.new_empty(*per_head, 2, dtype=torch.float32)
    programs = min(max(_PROGRAMS // (rows * num_kv_heads), 1), MAX_SPLITS)
    _attend_rows[(rows * num_kv_heads, programs)](
        qkv, q_weight, k_weight, eps, cos_sin, positions, angle_rows, slot_mapping,
        block_tables, block_tables.stride(0), k_cache, v_cache, out,
        splits_done, partial_out, partial_stats, rows, head_dim**-0.5 * LOG2_E,
        KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        MANY_SPLITS=programs < MAX_SPLITS,
        ROWS=_NEW_KEYS, M=triton.next_power_of_2(group), D=triton.next_power_of_2(head_dim),
        W=_WARPS, N=16 * _WARPS, num_warps=_WARPS, num_stages=2, **launch_options(chained),
    )  # fmt: skip
    return out


@triton.jit(
    do_not_specialize=["rows", "table_stride"],
    do_not_specialize_on_alignment=["positions", "angle_rows", "slot_mapping", "block_tables"],
)
def _attend_rows(
    qkv, q_weight, k_weight, eps, cos_sin, positions, angle_rows, slot_mapping, block_tables,
    table_stride,
    k_cache, v_cache, out, splits_done, partial_out, partial_stats, rows, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    MANY_SPLITS: tl.constexpr, ROWS: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    W: tl.constexpr, N: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Process a split of one row for one KV head, or if MANY_SPLITS every split that is
    num_programs(1) after the last one. The M rows of a tile are the KV head's query heads.

    Positions, slots, block tables and the first tile of keys are read before the wait: no kernel of
    the chain stores them.
    """
    let_next_begin(CHAINED)
    row = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    head = tl.program_id(0) % KV_HEADS
    split = tl.program_id(1)
    position = tl.load(positions + row, cache_modifier=".cg")
    if split > tl.cdiv(position, N):  # most programs without a split end here
        return
    table = block_tables + row * table_stride
    new = _new_keys(
        row, position, positions, angle_rows, slot_mapping, table, rows, BLOCK_SIZE, ROWS
    )
    tiles = tl.cdiv(new[4], N)
    count = tl.minimum(tiles, _MAX_SPLITS - 1)
    if split > count:
        return
    angles = cos_sin + tl.load(angle_rows + row, cache_modifier=".cg") * HEAD_DIM
    k, v, seen = _load_first_tile(
        split, count, tiles, k_cache, v_cache, table, new[4], head, KV_HEADS, HEAD_DIM, BLOCK_SIZE,
        D, W, N,
    )  # fmt: skip
    wait_for_previous(CHAINED)

    token = qkv + row * (GROUP + 2) * KV_HEADS * HEAD_DIM
    member = tl.arange(0, W * M)[:, None] % M  # each warp has all heads
    queries = _norm_and_rotate(
        token + (head * GROUP + member) * HEAD_DIM, q_weight, eps, angles, member < GROUP,
        HEAD_DIM, D,
    )  # fmt: skip
    queries = tl.reshape(queries, [W, M, D])
    if MANY_SPLITS:
        for each in range(split, count + 1, tl.num_programs(1)):
            _process_split(
                each, count, tiles, queries, k, v, seen, qkv, k_weight, eps, cos_sin, new, row,
                head, k_cache, v_cache, table, out, splits_done, partial_out, partial_stats, scale,
                KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE, M, D, W, N,
            )  # fmt: skip
            k, v, seen = _load_first_tile(
                each + tl.num_programs(1), count, tiles, k_cache, v_cache, table, new[4], head,
                KV_HEADS, HEAD_DIM, BLOCK_SIZE, D, W, N,
            )  # fmt: skip
    else:  # a loop of one turn computes all addresses before it
        _process_split(
            split, count, tiles, queries, k, v, seen, qkv, k_weight, eps, cos_sin, new, row, head,
            k_cache, v_cache, table, out, splits_done, partial_out, partial_stats, scale,
            KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE, M, D, W, N,
        )  # fmt: skip


@triton.jit
def _process_split(
    split, count, tiles, queries, k, v, seen, qkv, k_weight, eps, cos_sin, new, row, head,
    k_cache, v_cache, table, out, splits_done, partial_out, partial_stats, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    M: tl.constexpr, D: tl.constexpr, W: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Attend to keys in the cache, `k`, `v` and `seen` first, or as the last split to the new ones.
    Merge after all splits.
    """
    acc = tl.zeros([W, M, D], tl.float32)
    score_max = tl.full([M], float("-inf"), tl.float32)
    weight_sum = tl.zeros([W, M], tl.float32)
    if split == count:
        k, v, seen = _load_new_keys(
            qkv, k_weight, eps, cos_sin, new, row, head, k_cache, v_cache,
            KV_HEADS, GROUP, HEAD_DIM, D, W,
        )  # fmt: skip
        acc, score_max, weight_sum = _attend_tile(
            acc, score_max, weight_sum, queries, k, v, seen, scale
        )
    else:
        acc, score_max, weight_sum = _attend_stored_keys(
            acc, score_max, weight_sum, queries, k, v, seen,
            tiles * split // count, tiles * (split + 1) // count, k_cache, v_cache, table,
            new[4], head, scale, KV_HEADS, HEAD_DIM, BLOCK_SIZE, D, W, N,
        )  # fmt: skip
    acc = tl.sum(acc, 0)
    weight_sum = tl.sum(weight_sum, 0)
    first = (row * KV_HEADS + head) * GROUP
    if count == 0:
        heads = tl.arange(0, M)[:, None]
        dims = tl.arange(0, D)[None, :]
        inside = (heads < GROUP) & (dims < HEAD_DIM)
        tl.store(out + (first + heads) * HEAD_DIM + dims, acc / weight_sum[:, None], inside)
    else:
        scratch = (row * _MAX_SPLITS * KV_HEADS + head) * GROUP
        finish_split(
            out + first * HEAD_DIM, partial_out, partial_stats, scratch,
            scratch + split * KV_HEADS * GROUP, count + 1, splits_done + row * KV_HEADS + head,
            acc, score_max, weight_sum, None, head, KV_HEADS, GROUP, HEAD_DIM, M, D,
            AT_ONCE=_MERGED_AT_ONCE,
        )  # fmt: skip


@triton.jit
def _new_keys(
    row, position, positions, angle_rows, slot_mapping, table, rows,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return which rows of the batch have keys that `row` sees.

    They are the tokens of its sequence up to its own position. A slot that its block table leads to
    tells: a block that takes a new token is of one sequence only.

    Returns:
        The rows [ROWS], their angle rows [ROWS], slots [ROWS], whether they are seen [ROWS], and
        the number of keys in the cache, those before the first of them.
    """
    other = tl.arange(0, ROWS)
    # ".cg" reads from the L2: before the wait, the L1 may hold what the last step read.
    theirs = tl.load(positions + other, other < rows, 0, cache_modifier=".cg")
    slot = tl.load(slot_mapping + other, other < rows, -1, cache_modifier=".cg")
    earlier = (other < rows) & (theirs <= position)
    block = tl.load(table + theirs // BLOCK_SIZE, earlier, 0, cache_modifier=".cg").to(tl.int64)
    seen = earlier & (block * BLOCK_SIZE + theirs % BLOCK_SIZE == slot)
    seen = seen | (other == row)
    stored = tl.min(tl.where(seen, theirs, position)).to(tl.int32)
    angle_row = tl.load(angle_rows + other, other < rows, 0, cache_modifier=".cg")
    return other, angle_row, slot, seen, stored


@triton.jit
def _norm_and_rotate(heads, weight, eps, angles, inside, HEAD_DIM: tl.constexpr, D: tl.constexpr):
    """Return heads [X, D], normalised if there is a `weight`, and rotated.

    Args:
        heads: [X, 1] pointers to heads.
        angles: pointers to their cosines, then sines; [X, 1], or one for all.
        inside: [X, 1], the heads to load; the others are 0.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    dims = tl.broadcast_to(tl.arange(0, D)[None, :], [heads.shape[0], D])
    is_first = dims < HALF
    partner = tl.where(is_first, dims + HALF, dims - HALF)
    angle = angles + tl.where(is_first, dims, dims - HALF)
    cos = tl.load(angle, dims < HEAD_DIM, 0.0)
    sin = tl.load(angle + HALF, dims < HEAD_DIM, 0.0)
    if weight is not None:
        x_factor = tl.load(weight + dims, dims < HEAD_DIM, 0.0).to(tl.float32)
        y_factor = tl.load(weight + partner, dims < HEAD_DIM, 0.0).to(tl.float32)
    inside = inside & (dims < HEAD_DIM)
    x = tl.load(heads + dims, inside, 0.0)
    y = tl.load(heads + partner, inside, 0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    y = y.to(tl.float32)
    if weight is not None:
        scale = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / HEAD_DIM + eps)
        x = ((x * scale).to(dtype).to(tl.float32) * x_factor).to(dtype).to(tl.float32)
        y = ((y * scale).to(dtype).to(tl.float32) * y_factor).to(dtype).to(tl.float32)
    return (x * cos + tl.where(is_first, -y, y) * sin).to(dtype)


@triton.jit
def _load_first_tile(
    split, count, tiles, k_cache, v_cache, table, stored, head,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr, W: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Return what `_load_tile` does of a split's first tile; nothing is loaded if it has none."""
    first = tiles * split // tl.maximum(count, 1)
    stop = tl.where(split < count, first + 1, first)
    block = block_ids(table, first, stop, stored, BLOCK_SIZE, N)
    return _load_tile(
        block, first, tl.where(split < count, stored, 0), k_cache, v_cache, head,
        KV_HEADS, HEAD_DIM, BLOCK_SIZE, D, W, N,
    )  # fmt: skip


@triton.jit
def _load_tile(
    block, tile, stored, k_cache, v_cache, head,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr, W: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Return keys and values [W, N / W, D] of a tile, and which of them are before `stored`."""
    keys = tile * N + tl.arange(0, W)[:, None] * (N // W) + tl.arange(0, N // W)[None, :]
    if BLOCK_SIZE % N == 0:
        slots = block * BLOCK_SIZE + keys % BLOCK_SIZE
    else:
        slots = tl.reshape(block, [W, N // W]) * BLOCK_SIZE + keys % BLOCK_SIZE
    dims = tl.arange(0, D)[None, None, :]
    places = ((slots * KV_HEADS + head) * HEAD_DIM)[:, :, None] + dims
    mask = (keys < stored)[:, :, None] & (dims < HEAD_DIM)
    # ".cg" reads from the L2: before the wait, the L1 may hold what the last step read.
    k = tl.load(k_cache + places, mask=mask, other=0.0, cache_modifier=".cg")
    v = tl.load(v_cache + places, mask=mask, other=0.0, cache_modifier=".cg")
    return k, v, keys < stored


@triton.jit
def _attend_stored_keys(
    acc, score_max, weight_sum, queries, k, v, seen, first, last, k_cache, v_cache, table, stored,
    head, scale,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr, W: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Process the key tiles [first, last), `k`, `v` and `seen` first. See also `_attend_tile`."""
    block = block_ids(table, first + 1, last, stored, BLOCK_SIZE, N)
    acc, score_max, weight_sum = _attend_tile(
        acc, score_max, weight_sum, queries, k, v, seen, scale
    )
    for tile in range(first + 1, last):
        k, v, seen = _load_tile(
            block, tile, stored, k_cache, v_cache, head, KV_HEADS, HEAD_DIM, BLOCK_SIZE, D, W, N
        )
        block = block_ids(table, tile + 1, last, stored, BLOCK_SIZE, N)
        acc, score_max, weight_sum = _attend_tile(
            acc, score_max, weight_sum, queries, k, v, seen, scale
        )
    return acc, score_max, weight_sum


@triton.jit
def _load_new_keys(
    qkv, k_weight, eps, cos_sin, new, row, head, k_cache, v_cache,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    D: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Return the keys of `_new_keys` as `_attend_tile` takes them. Store the row's own."""
    other, angle_rows, slots, seen, _ = new
    ROWS: tl.constexpr = other.shape[0]
    dims = tl.arange(0, D)[None, :]
    inside = seen[:, None] & (dims < HEAD_DIM)
    tokens = qkv + other[:, None] * (GROUP + 2) * KV_HEADS * HEAD_DIM
    keys = tokens + (GROUP * KV_HEADS + head) * HEAD_DIM
    v = tl.load(keys + KV_HEADS * HEAD_DIM + dims, inside, 0.0)
    angles = cos_sin + angle_rows[:, None] * HEAD_DIM
    k = _norm_and_rotate(keys, k_weight, eps, angles, seen[:, None], HEAD_DIM, D)
    place = (slots[:, None] * KV_HEADS + head) * HEAD_DIM + dims
    is_own = inside & ((other == row) & (slots >= 0))[:, None]
    tl.store(k_cache + place, k, is_own)
    tl.store(v_cache + place, v, is_own)
    of_first_warp = seen[None, :] & (tl.arange(0, W)[:, None] == 0)
    k = tl.broadcast_to(k[None, :, :], [W, ROWS, D])
    return k, tl.broadcast_to(v[None, :, :], [W, ROWS, D]), of_first_warp


@triton.jit
def _attend_tile(acc, score_max, weight_sum, queries, k, v, seen, scale):
    """Process a tile of keys as `online_softmax.attend` does, but each warp sums up its own keys.

    Args:
        acc, score_max, weight_sum: [W, M, D], [M] and [W, M] float32, the state so far. Return
            their new values.
        queries: [W, M, D], the same for each warp.
        k, v: [W, keys, D].
        seen: [W, keys], which of them count.
        scale: factor of the scores, including LOG2_E.
    """
    scores = tl.dot(queries, tl.permute(k, (0, 2, 1)))
    scores = tl.where(seen[:, None, :], scores, float("-inf"))
    new_max = tl.maximum(score_max, tl.max(tl.max(scores, 2), 0) * scale)
    weights = tl.exp2(tl.fma(scores, scale, -new_max[None, :, None]))
    shrink = tl.exp2(score_max - new_max)
    weight_sum = tl.fma(weight_sum, shrink[None, :], tl.sum(weights, 2))
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[None, :, None])
    return acc, new_max, weight_sum
