"""What both attention kernels share: a tile of queries against tiles of keys in paged memory, and
the merge of results over parts of a row's keys, its splits.

k_cache and v_cache are [num_blocks, block_size, num_kv_heads, head_dim]; blocks need not be
contiguous. Where the values are the last VALUE_DIM numbers of the keys, there is one KV head, and
v_cache is not read: a tile's values are multiplied by queries and by weights, and the rest of its
keys by the rest of the queries.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634  # factor of the scores, because weights are computed with exp2
MAX_SPLITS = 32
"""Maximum number of splits of a row's keys. Bounds the scratch memory."""

MAX_GROUP = 16
"""Maximum query heads of a tile, where all query heads share a KV head: the sums of 16 fit the
registers. Programs of the same keys run side by side and share them in the L2."""
NO_SCORE = tl.constexpr(-1e30)
"""The maximum score of a query that has seen no key yet, where whole tiles may be masked for it:
the difference of two infinities would be NaN."""

_LOG2_E = tl.constexpr(LOG2_E)
_MERGED_NUMBERS = tl.constexpr(4096)
"""Numbers of a KV head's splits that are loaded at once, at most."""


class Scores(NamedTuple):
    """Which scores a softmax is taken of, and which values are summed: the fields of
    `AttentionSpec` of the same names.
    """

    scale: float | None = None
    window: int | None = None
    softcap: float = 0.0
    value_dim: int | None = None

    def visible(self, keys: int) -> int:
        """Return how many of the last `keys` keys the last token sees."""
        return keys if self.window is None else min(keys, self.window)

    def factor(self, head_dim: int) -> float:
        """Return the argument `scale` of `attend`."""
        scale = head_dim**-0.5 if self.scale is None else self.scale
        return scale * LOG2_E * (2 / self.softcap if self.softcap else 1)

    def constants(self) -> dict[str, float | None]:
        """Return the constants of the same names in the kernels; None where there is none."""
        softcap = self.softcap or None
        return {"WINDOW": self.window, "SOFTCAP": softcap, "VALUE_DIM": self.value_dim}

    def groups(self, num_heads: int, num_kv_heads: int) -> int:
        """Return the number of groups of query heads, each of which has its own programs.

        They are those of the KV heads; of a KV head whose keys are also values, so many that a
        tile of queries has at most MAX_GROUP heads.
        """
        if self.value_dim is None:
            return num_kv_heads
        return next(
            n for n in range(1, num_heads + 1) if num_heads % n == 0 and num_heads // n <= MAX_GROUP
        )

    def output_dim(self, head_dim: int) -> int:
        """Return the numbers of a head's result."""
        return self.value_dim or head_dim


PLAIN = Scores()


def block_stride(kv_cache: torch.Tensor) -> int:
    """Return the distance between two blocks of `kv_cache`, inside which numbers are contiguous."""
    num_heads, head_dim = kv_cache.shape[3:]
    strides = kv_cache.stride()
    assert strides[2:] == (num_heads * head_dim, head_dim, 1)
    return strides[1]


def padded(head_dim: int) -> int:
    """Return D, the numbers of a head in a tile: tl.dot takes a power of two from 16 on."""
    return max(16, int(triton.next_power_of_2(head_dim)))


def register_limit(dtype: torch.dtype, kv_cache: torch.Tensor) -> dict[str, int]:
    """Return launch options that limit the registers of a thread where an 8-bit cache is read.

    Without the limit, ptxas aims for one more program per SM and spills a few registers of the
    conversion from 8 bits.
    """
    if dtype.itemsize != 2 or kv_cache.dtype == dtype:
        return {}
    return {"maxnreg": 192 if kv_cache.shape[-1] <= 256 else 224}


@triton.jit
def attend(
    acc, score_max, weight_sum, q, rest, k_cache, v_cache, table, block, head, position, last_key,
    begin, seq_len, first, last, scale,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    VALUE_DIM: tl.constexpr, N: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Process the key tiles [first, last) with online softmax (arXiv 1805.02867) in base 2.

    Args:
        acc, score_max, weight_sum: [M, D], [M] and [M] float32, the state so far: the weighted sum
            of values, the maximum score and the sum of weights. Return their new values.
        q: [M, D], the queries; with a VALUE_DIM, their last numbers, as many as values have.
        rest: with a VALUE_DIM, the numbers before them; see `load_queries`.
        table: the row's block table.
        block: what `block_ids` returns for tile `first`.
        head: the KV head.
        position: [M], the key of each query, where its window ends.
        last_key: [M], the last key that each query sees.
        begin: the first key that any query sees. Read only with a WINDOW.
        scale: factor of the scores, including LOG2_E; with a SOFTCAP, what `Scores.factor` returns.
        BLOCK_STRIDE: distance between two blocks of the cache.
        WINDOW: the number of keys that a query sees at most; None: any number.
        SOFTCAP: a score s becomes SOFTCAP * tanh(s / SOFTCAP); None: it stays.
        MASKED: False if every query sees every key of the tiles.
    """
    for tile in range(first, last):
        keys = tile * N + tl.arange(0, N)
        if VALUE_DIM is None:
            k_places, v_places = _places_of_tile(
                k_cache, v_cache, block, tile, head,
                KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, N, D,
            )  # fmt: skip
            k, v = _load_tile(k_places, v_places, keys, begin, seq_len, HEAD_DIM, WINDOW, D, MASKED)
            scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="tf32x3")
        else:
            rows = _rows_of_tile(k_cache, block, tile, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, N)
            k, v = _load_rows(rows, keys, begin, seq_len, HEAD_DIM, VALUE_DIM, WINDOW, D, MASKED)
            scores = tl.dot(q, tl.trans(v), input_precision="tf32x3")
            scores = tl.dot(rest, tl.trans(k), scores, input_precision="tf32x3")
        block = block_ids(table, tile + 1, last, seq_len, BLOCK_SIZE, N, begin, WINDOW)
        factor = scale
        if SOFTCAP is not None:
            scores = 1 - 2 / (tl.exp2(scores * scale) + 1)  # tanh
            factor = SOFTCAP * _LOG2_E
        if MASKED:
            scores = tl.where(_seen(keys, position, last_key, WINDOW), scores, float("-inf"))
        # tl.fma rounds once. Left to the compiler, masked and unmasked tiles could round unequally.
        new_max = tl.maximum(score_max, tl.max(scores, 1) * factor)
        weights = tl.exp2(tl.fma(scores, factor, -new_max[:, None]))
        shrink = tl.exp2(score_max - new_max)
        weight_sum = tl.fma(weight_sum, shrink, tl.sum(weights, 1))
        v = v.to(q.dtype)
        acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None], input_precision="tf32x3")
        score_max = new_max
    return acc, score_max, weight_sum


@triton.jit
def _places_of_tile(
    k_cache, v_cache, block, tile, head,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Return where the keys of a tile and their values are; `block` is what `block_ids` returns."""
    dims = tl.arange(0, D)
    offsets = tl.arange(0, N)
    if BLOCK_SIZE % N == 0:
        base = block * BLOCK_STRIDE + tile * N % BLOCK_SIZE * (KV_HEADS * HEAD_DIM)
        places = ((offsets * KV_HEADS + head) * HEAD_DIM)[:, None] + dims[None, :]
        k_places = k_cache + base + places
        v_places = v_cache + base + places
    else:
        keys = tile * N + offsets
        slots = block * BLOCK_STRIDE + keys % BLOCK_SIZE * (KV_HEADS * HEAD_DIM)
        places = (slots + head * HEAD_DIM)[:, None] + dims[None, :]
        k_places = k_cache + places
        v_places = v_cache + places
    return k_places, v_places


@triton.jit
def _load_tile(
    k_places, v_places, keys, begin, seq_len,
    HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Load a tile of keys and values. If MASKED, those that no query sees are 0."""
    inside = (tl.arange(0, D) < HEAD_DIM)[None, :]
    if MASKED:
        mask = keys < seq_len
        if WINDOW is not None:
            mask = mask & (keys >= begin)
        mask = mask[:, None] & inside
        k = tl.load(k_places, mask=mask, other=0.0)
        v = tl.load(v_places, mask=mask, other=0.0)
    elif D == HEAD_DIM:
        k = tl.load(k_places)
        v = tl.load(v_places)
    else:
        k = tl.load(k_places, mask=inside, other=0.0)
        v = tl.load(v_places, mask=inside, other=0.0)
    return k, v


@triton.jit
def load_queries(
    q, heads, valid, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """Return the arguments `q` and `rest` of `attend` for the query heads `heads` [M], and for
    `store_result` the places of their results, from 0 on, and the mask.

    Args:
        q: [., HEAD_DIM] pointer.
        valid: [M], which of the queries are not padding.
    """
    OUT_DIM: tl.constexpr = HEAD_DIM if VALUE_DIM is None else VALUE_DIM
    dims = tl.arange(0, D)
    mask = valid[:, None] & (dims < OUT_DIM)[None, :]
    places = heads[:, None] * HEAD_DIM + (HEAD_DIM - OUT_DIM) + dims[None, :]
    queries = tl.load(q + places, mask=mask, other=0.0)
    rest = queries
    if VALUE_DIM is not None:
        R: tl.constexpr = max(16, triton.next_power_of_2(HEAD_DIM - VALUE_DIM))
        first = tl.arange(0, R)
        inside = valid[:, None] & (first < HEAD_DIM - VALUE_DIM)[None, :]
        rest = tl.load(q + heads[:, None] * HEAD_DIM + first[None, :], mask=inside, other=0.0)
    return queries, rest, heads[:, None] * OUT_DIM + dims[None, :], mask


@triton.jit
def _rows_of_tile(
    k_cache, block, tile, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Return where the rows [N] of a tile begin, in a cache of one KV head."""
    keys = tile * N + tl.arange(0, N)
    return k_cache + block * BLOCK_STRIDE + keys % BLOCK_SIZE * HEAD_DIM


@triton.jit
def _load_rows(
    rows, keys, begin, seq_len, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    WINDOW: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Load a tile of rows: the first numbers of each, and the last VALUE_DIM. If MASKED, rows that
    no query sees are 0.
    """
    SKIPPED: tl.constexpr = HEAD_DIM - VALUE_DIM
    R: tl.constexpr = max(16, triton.next_power_of_2(SKIPPED))
    first = tl.arange(0, R)
    dims = tl.arange(0, D)
    seen = keys >= 0
    if MASKED:
        seen = keys < seq_len
        if WINDOW is not None:
            seen = seen & (keys >= begin)
    mask = seen[:, None] & (first < SKIPPED)[None, :]
    k = tl.load(rows[:, None] + first[None, :], mask=mask, other=0.0)
    mask = seen[:, None] & (dims < VALUE_DIM)[None, :]
    v = tl.load(rows[:, None] + SKIPPED + dims[None, :], mask=mask, other=0.0)
    return k, v


@triton.jit
def _seen(keys, position, last_key, WINDOW: tl.constexpr):
    """Return which keys each query sees: see `attend`."""
    seen = keys[None, :] <= last_key[:, None]
    if WINDOW is not None:
        seen = seen & (keys[None, :] > position[:, None] - WINDOW)
    return seen


@triton.jit
def block_ids(
    table, tile, last, seq_len, BLOCK_SIZE: tl.constexpr, N: tl.constexpr,
    begin=0, WINDOW: tl.constexpr = None,
):  # fmt: skip
    """Return the block id of a key tile as int64, or of each key if the tile may span blocks.

    Load 0 for tiles from `last` on: the loop fetches block ids one tile ahead. With a WINDOW also
    for keys before `begin`: their blocks may have been given away.
    """
    if BLOCK_SIZE % N == 0:
        block = tl.load(table + tile * N // BLOCK_SIZE, mask=tile < last, other=0)
    else:
        keys = tile * N + tl.arange(0, N)
        mask = (keys < seq_len) & (tile < last)
        if WINDOW is not None:
            mask = mask & (keys >= begin)
        block = tl.load(table + keys // BLOCK_SIZE, mask=mask, other=0)
    return block.to(tl.int64)


@triton.jit
def sink_weight(sinks, heads, score_max, inside):
    """Return the weight of each head's sink, a logit that has no value: see `AttentionSpec.sinks`.

    Args:
        sinks: [heads] float32 pointer.
        heads: of any shape, like `score_max` and `inside`.
        score_max: the maximum score (log2) of the keys.
    """
    return tl.exp2(tl.load(sinks + heads, inside, 0.0) * _LOG2_E - score_max)


@triton.jit
def store_result(places, acc, score_max, weight_sum, sinks, heads, valid, mask):
    """Store the results of queries whose keys were not split.

    Args:
        places: [M, D], where they go.
        heads: [M], the query heads; read only if there are `sinks`.
        valid: [M], which of the queries are not padding.
        mask: [M, D], their numbers inside a head.
    """
    if sinks is not None:
        weight_sum += sink_weight(sinks, heads, score_max, valid)
    tl.store(places, acc / weight_sum[:, None], mask=mask)


@triton.jit
def store_split(
    partial_out, partial_stats, rows, acc, score_max, weight_sum, valid, mask,
    HEAD_DIM: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Store what `merge` reads of a split, in the `rows` of `partial_out`; see `store_result`."""
    places = rows[:, None] * HEAD_DIM + tl.arange(0, D)[None, :]
    tl.store(partial_out + places, acc, mask=mask)
    tl.store(partial_stats + rows * 2, score_max, mask=valid)
    tl.store(partial_stats + rows * 2 + 1, weight_sum, mask=valid)


@triton.jit
def finish_split(
    out, partial_out, partial_stats, first, own, count, done, acc, score_max, weight_sum,
    sinks, kv_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, M: tl.constexpr,
    D: tl.constexpr, AT_ONCE: tl.constexpr = 4,
):  # fmt: skip
    """Store the result of a query token's split for a KV head, and after all splits `merge` them.

    Args:
        own: index of the split's first head among all rows of `partial_out`.
        done: pointer to the number of finished splits of the token and the KV head; 0 again at the
            end.
        acc, score_max, weight_sum: [M, D], [M] and [M], as `attend` returns them.
        out, partial_out, partial_stats, first, count, sinks, kv_head, AT_ONCE: see `merge`.
    """
    member = tl.arange(0, M)
    valid = member < GROUP
    store_split(
        partial_out, partial_stats, own + member, acc, score_max, weight_sum, valid,
        valid[:, None] & (tl.arange(0, D) < HEAD_DIM)[None, :], HEAD_DIM, D,
    )  # fmt: skip
    tl.debug_barrier()  # all threads must have stored before the split counts as done
    merge_last(
        out, partial_out, partial_stats, first, count, done, sinks, kv_head,
        KV_HEADS, GROUP, HEAD_DIM, D, AT_ONCE,
    )  # fmt: skip


@triton.jit
def merge_last(
    out, partial_out, partial_stats, first, count, done, sinks, kv_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Count a split that all threads have stored, and `merge` the splits if it was the last."""
    if tl.atomic_add(done, 1, sem="acq_rel") == count - 1:
        merge(
            out, partial_out, partial_stats, first, count, sinks, kv_head,
            KV_HEADS=KV_HEADS, GROUP=GROUP, HEAD_DIM=HEAD_DIM, D=D, AT_ONCE=AT_ONCE,
        )  # fmt: skip
        tl.store(done, 0)


@triton.jit
def merge(
    out, partial_out, partial_stats, first, count, sinks, kv_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    AT_ONCE: tl.constexpr = 4,
):  # fmt: skip
    """Merge the results of the `count` splits of a query token's keys, for the heads of a KV head.

    The splits are added up one after another, so the order of the sum is fixed. Some are loaded at
    once, and their weights do not wait for one another.

    Args:
        out: where the result of the first head goes. The other heads' follow it.
        partial_out: [., KV_HEADS * GROUP, HEAD_DIM] float32, the weighted sum of values of each
            split; the splits of a token follow one another.
        partial_stats: [., KV_HEADS * GROUP, 2] float32: maximum score (log2), and sum of weights.
        first: index of the first split's first head among all rows of `partial_out`.
        sinks: [KV_HEADS * GROUP] float32, or None.
        kv_head: which KV head.
        AT_ONCE: how many splits are loaded at once, if there are registers for them.
    """
    HEADS: tl.constexpr = triton.next_power_of_2(GROUP)
    dims = tl.broadcast_to(tl.arange(0, D)[None, :], [HEADS, D])
    member = tl.broadcast_to(tl.arange(0, HEADS)[:, None], [HEADS, D])
    inside = (member < GROUP) & (dims < HEAD_DIM)
    MOST: tl.constexpr = max(1, min(AT_ONCE, _MERGED_NUMBERS // (HEADS * D)))
    score_max = tl.full([HEADS, D], float("-inf"), tl.float32)
    weight_sum = tl.zeros([HEADS, D], tl.float32)
    value = tl.zeros([HEADS, D], tl.float32)
    for start in range(0, count, MOST):
        new_max = score_max
        # ".cg" reads from the L2. The other programs' stores are there, the L1 may be stale.
        for split in tl.static_range(0, MOST):
            valid = inside & (start + split < count)
            head = first + (start + split) * KV_HEADS * GROUP + member
            split_max = tl.load(partial_stats + head * 2, valid, -1e30, cache_modifier=".cg")
            new_max = tl.maximum(new_max, split_max)
        shrink = tl.exp2(score_max - new_max)
        weight_sum *= shrink
        value *= shrink
        for split in tl.static_range(0, MOST):
            valid = inside & (start + split < count)
            head = first + (start + split) * KV_HEADS * GROUP + member
            split_max = tl.load(partial_stats + head * 2, valid, -1e30, cache_modifier=".cg")
            split_sum = tl.load(partial_stats + head * 2 + 1, valid, 0.0, cache_modifier=".cg")
            # A thread gets single numbers, as of the statistics. No layout has to be converted.
            place = tl.max_contiguous(head * HEAD_DIM + dims, [1, 1])
            part = tl.load(partial_out + place, valid, 0.0, cache_modifier=".cg")
            weight = tl.exp2(split_max - new_max)
            weight_sum = tl.fma(split_sum, weight, weight_sum)
            value = tl.fma(part, weight, value)
        score_max = new_max
    if sinks is not None:
        weight_sum += sink_weight(sinks, kv_head * GROUP + member, score_max, inside)
    tl.store(out + member * HEAD_DIM + dims, value / weight_sum, mask=inside)
