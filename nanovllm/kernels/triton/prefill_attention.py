"""Paged attention for rows with several query tokens, in Triton, as in FlashAttention-2. A row with
few tiles of queries after a long prefix gets its keys split.

The KV cache of a layer is [2, num_blocks, block_size, num_kv_heads, head_dim]; its blocks may lie
apart. Knows tensors only: no batches, no models. docs/cuda.md says how the sizes below were chosen.
"""

import dataclasses
import functools

import torch
import triton
import triton.language as tl

from nanovllm.kernels.triton.launch import Arguments, Launch
from nanovllm.kernels.triton.online_softmax import (
    MAX_SPLITS,
    NO_SCORE,
    PLAIN,
    Scores,
    attend,
    block_ids,
    block_stride,
    load_queries,
    merge,
    padded,
    register_limit,
    store_result,
    store_split,
)

SPLIT_TOKENS = 512  # minimum computed keys in a split
SPLIT_PROGRAMS = 256
"""Maximum programs of a row whose keys are split: nearly two for each SM of an H100."""

_MERGED_TOKENS = tl.constexpr(8)
"""Maximum query tokens of an entry of `PrefillLaunch.merges`. Each has separate programs."""
_MAX_PARTIAL_ROWS = 2**17
"""Maximum results of splits, of a head and a query token each, in one launch: 64 MiB at a head_dim
of 128. A batch with more takes several launches. One row has at most SPLIT_PROGRAMS * M."""


@dataclasses.dataclass(frozen=True)
class PrefillLaunch:
    """The query tiles of one launch, and the tokens whose splits the next launch merges."""

    tiles: torch.Tensor
    """[N, 5] int32: row, offset of the first token in the row's query tokens, split, number of
    splits, place of the first token's results in `partial_out`; most keys first."""
    merges: torch.Tensor
    """[N, 4] int32: first query token, number of tokens, number of splits, place of the first
    token's results in `partial_out`."""
    launch_tiles: Launch
    launch_merges: Launch


@dataclasses.dataclass(frozen=True)
class PrefillPlan:
    """The query tiles of the rows with several query tokens, and scratch memory for split keys.

    The layers of a step share one plan, so they must run one after another. Their caches have the
    same strides.
    """

    launches: tuple[PrefillLaunch, ...]
    partial_out: torch.Tensor
    """[P, num_heads, output_dim] float32, the weighted sum of values of each split. The splits of a
    token follow one another, then come those of the next. P is 0 if no row is split."""
    partial_stats: torch.Tensor
    """[P, num_heads, 2] float32: maximum score (log2), and sum of weights."""
    scores: Scores


@dataclasses.dataclass
class _Part:
    """One launch, while it is planned."""

    tiles: list[tuple[int, tuple[int, ...]]] = dataclasses.field(default_factory=list)
    """Keys that are read, to within a tile of keys, and the entry of `PrefillLaunch.tiles`."""
    merges: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    partials: int = 0


def plan_prefill(
    query_lens: tuple[int, ...],
    seq_lens: tuple[int, ...],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    scores: Scores = PLAIN,
) -> PrefillPlan | None:
    """Return the query tiles of the rows with several query tokens, or None if there is none.

    The tiles and splits of a row depend on its own lengths only.
    """
    groups = scores.groups(num_heads, num_kv_heads)
    group = num_heads // groups
    output_dim = scores.output_dim(head_dim)
    tokens = _prefill_options(dtype, output_dim, group)["M"] // group
    parts = [_Part()]
    start = 0
    for row, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        if query_len > 1:
            tiles = triton.cdiv(query_len, tokens)
            splits = splits_of_row(scores.visible(seq_len - query_len), tiles * groups)
            partials = query_len * splits if splits > 1 else 0
            needed = (parts[-1].partials + partials) * num_heads
            if parts[-1].partials and needed > _MAX_PARTIAL_ROWS:
                parts.append(_Part())
            lens = query_len, seq_len, scores.visible(seq_len)
            _add_row(parts[-1], row, start, lens, tokens, splits)
        start += query_len
    if not parts[0].tiles:
        return None
    most = max(part.partials for part in parts)
    return PrefillPlan(
        _upload(parts, device),
        torch.empty(most, num_heads, output_dim, dtype=torch.float32, device=device),
        torch.empty(most, num_heads, 2, dtype=torch.float32, device=device),
        scores,
    )


def splits_of_row(num_computed: int, programs: int) -> int:
    """Return the number of splits of a row's keys, `num_computed` of which are before its query
    tokens; without splits it has so many `programs`.
    """
    return max(1, min(num_computed // SPLIT_TOKENS, SPLIT_PROGRAMS // programs, MAX_SPLITS))


def _add_row(
    part: _Part, row: int, start: int, lens: tuple[int, int, int], tokens: int, splits: int
) -> None:
    """Add a row of `lens`: its query tokens, its keys, and those that a query token sees at most.

    The query tokens begin at token `start` of the batch.
    """
    query_len, seq_len, visible = lens
    for first in range(0, query_len, tokens):
        stop = min(first + tokens, query_len)
        keys = (min(seq_len - query_len + first, visible) + stop - first) // splits
        place = part.partials + first * splits
        part.tiles += [(keys, (row, first, split, splits, place)) for split in range(splits)]
    if splits > 1:
        step = _MERGED_TOKENS.value
        part.merges += [
            (start + first, min(query_len - first, step), splits, part.partials + first * splits)
            for first in range(0, query_len, step)
        ]
        part.partials += query_len * splits


def _upload(parts: list[_Part], device: torch.device) -> tuple[PrefillLaunch, ...]:
    """Copy all lists to the device at once, without waiting for it."""
    entries: list[tuple[int, ...]] = []
    for part in parts:
        part.tiles.sort(key=lambda tile: -tile[0])
        entries += [entry for _, entry in part.tiles] + part.merges
    sizes = [size for part in parts for size in (5 * len(part.tiles), 4 * len(part.merges))]
    numbers = [number for entry in entries for number in entry]
    host = torch.tensor(numbers, dtype=torch.int32, pin_memory=device.type == "cuda")
    lists = iter(host.to(device, non_blocking=True).split(sizes))
    return tuple(
        PrefillLaunch(
            tiles.view(-1, 5), merges.view(-1, 4), Launch(_prefill_tile), Launch(_merge_prefill)
        )
        for tiles, merges in zip(lists, lists, strict=True)
    )


def prefill(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    plan: PrefillPlan,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
) -> None:
    """Compute attention for the rows of `plan`, as in FlashAttention-2 (arXiv 2307.08691).

    Tiles of keys are counted from the start of the sequence, so the result for a query token of a
    row without splits does not depend on where its chunk starts.

    The arguments are those of `decode_attention.decode`, and the lengths of the batch's rows.

    Args:
        ends: [T] int32, `Batch.ends`.
    """
    assert q.is_contiguous()
    tensors = q, kv_cache[0], kv_cache[-1], out, sinks
    partial = plan.partial_out, plan.partial_stats
    head_dim = q.shape[2]
    groups = plan.scores.groups(q.shape[1], kv_cache.shape[3])
    group = q.shape[1] // groups
    output_dim = plan.scores.output_dim(head_dim)

    constants = {"KV_HEADS": groups, "GROUP": group, "D": padded(output_dim)}

    def tiles(launch: PrefillLaunch) -> Arguments:
        sizes = _prefill_options(q.dtype, output_dim, group)
        if kv_cache.dtype != q.dtype:  # four warps have no registers left to convert 8 bits in
            sizes |= {"num_warps": 8, "num_stages": 2}
        fixed = (
            block_tables, block_tables.stride(0), cu_seqlens_q, seq_lens, ends, launch.tiles,
            *partial, plan.scores.factor(head_dim),
        )  # fmt: skip
        options = {
            **constants, **plan.scores.constants(), "HEAD_DIM": head_dim,
            "BLOCK_SIZE": kv_cache.shape[2], "BLOCK_STRIDE": block_stride(kv_cache),
            "TOKENS": sizes["M"] // group, "SPLIT": len(launch.merges) > 0, **sizes,
            **register_limit(q.dtype, kv_cache),
        }  # fmt: skip
        return Arguments((len(launch.tiles) * groups,), fixed, options)

    def merges(launch: PrefillLaunch) -> Arguments:
        grid = (len(launch.merges) * _MERGED_TOKENS.value * groups,)
        warps = 8 if triton.next_power_of_2(group) * padded(output_dim) > 4096 else 4
        options = {**constants, "HEAD_DIM": output_dim, "num_warps": warps}
        return Arguments(grid, (*partial, launch.merges), options)

    for launch in plan.launches:
        launch.launch_tiles(*tensors, arguments=functools.partial(tiles, launch))
        if len(launch.merges):
            launch.launch_merges(out, sinks, arguments=functools.partial(merges, launch))


def _prefill_options(dtype: torch.dtype, output_dim: int, group: int) -> dict[str, int]:
    """Return the launch options.

    M is the number of rows of a query tile, tokens times the query heads of a KV head. N is the
    number of keys in a tile. float32 takes smaller tiles: `tf32x3` keeps each operand in registers
    in several parts. Up to a head_dim of 128 four warps spill a few registers and are faster all
    the same: two programs fit an SM.
    """
    if dtype == torch.float32:
        options = {"M": 16, "N": 16 if output_dim > 128 else 32, "num_warps": 4, "num_stages": 2}
    elif output_dim <= 128:
        options = {"M": 128, "N": 32, "num_warps": 4, "num_stages": 3}
    else:
        options = {"M": 64, "N": 32, "num_warps": 8, "num_stages": 2}
        if output_dim > 256:
            options |= {"M": 32, "N": 16}
    return {**options, "M": max(options["M"], triton.next_power_of_2(group))}


# Values that change from batch to batch must not cause a recompilation. By default Triton compiles
# another kernel for an integer that is 1 or a multiple of 16, and for a pointer that is not aligned
# to 16 bytes.
@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["cu_seqlens_q", "seq_lens", "block_tables", "ends", "tiles"],
)
def _prefill_tile(
    q, k_cache, v_cache, out, sinks, block_tables, table_stride, cu_seqlens_q, seq_lens, ends,
    tiles, partial_out, partial_stats, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    VALUE_DIM: tl.constexpr, TOKENS: tl.constexpr, SPLIT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Process one query tile for one KV head: TOKENS query tokens times GROUP query heads.

    The M - TOKENS * GROUP rows at the end of the tile are padding.
    SPLIT says whether any row of the launch is split: without splits, fewer registers are needed.
    """
    tile = tiles + tl.program_id(0) // KV_HEADS * 5
    head = tl.program_id(0) % KV_HEADS
    row = tl.load(tile).to(tl.int64)
    first = tl.load(tile + 1)
    start = tl.load(cu_seqlens_q + row)
    query_len = tl.load(cu_seqlens_q + row + 1) - start
    seq_len = tl.load(seq_lens + row)
    OUT_DIM: tl.constexpr = HEAD_DIM if VALUE_DIM is None else VALUE_DIM
    member = tl.arange(0, M)
    token = first + member // GROUP
    valid = (member < TOKENS * GROUP) & (token < query_len)
    heads = ((start + token).to(tl.int64) * KV_HEADS + head) * GROUP + member % GROUP
    queries, rest, place, mask = load_queries(q, heads, valid, HEAD_DIM, VALUE_DIM, D)
    num_computed = seq_len - query_len
    num_keys = tl.minimum(num_computed + first + TOKENS, seq_len)
    last_key = num_computed + token
    stop = num_keys
    if ends is not None:
        last_key = tl.load(ends + start + token, mask=valid, other=1) - 1
        stop = tl.max(last_key) + 1
    split = 0
    splits = 1
    if SPLIT:
        split = tl.load(tile + 2)
        splits = tl.load(tile + 3)
    key_tiles = _key_tiles(
        num_computed + first, num_keys, stop, split, splits, WINDOW, SPLIT, N,
    )  # fmt: skip
    acc, score_max, weight_sum = _attend_tiles(
        queries, rest, k_cache, v_cache, block_tables + row * table_stride, head,
        num_computed + token, last_key, seq_len, key_tiles, scale,
        KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, WINDOW, SOFTCAP, VALUE_DIM, M, N, D,
    )  # fmt: skip
    if not SPLIT or splits == 1:
        store_result(
            out + place, acc, score_max, weight_sum, sinks, head * GROUP + member % GROUP,
            valid, mask,
        )  # fmt: skip
    else:
        scratch = tl.load(tile + 4) + member // GROUP * splits + split
        scratch = (scratch * KV_HEADS + head) * GROUP + member % GROUP
        store_split(
            partial_out, partial_stats, scratch, acc, score_max, weight_sum, valid, mask,
            OUT_DIM, D,
        )  # fmt: skip


@triton.jit
def _attend_tiles(
    queries, rest, k_cache, v_cache, table, head, position, last_key, seq_len, key_tiles, scale,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    VALUE_DIM: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Attend with the queries [M, D] to `key_tiles`, which `_key_tiles` returned; see `attend`."""
    first_key = key_tiles[0]
    bounds = key_tiles[1:]
    acc = tl.zeros([M, D], tl.float32)
    score_max = tl.full([M], NO_SCORE if WINDOW is not None else float("-inf"), tl.float32)
    weight_sum = tl.zeros([M], tl.float32)
    for part in tl.static_range(1 if WINDOW is None else 0, 3):
        first = bounds[part]
        stop = bounds[part + 1]
        acc, score_max, weight_sum = attend(
            acc, score_max, weight_sum, queries, rest, k_cache, v_cache, table,
            block_ids(table, first, stop, seq_len, BLOCK_SIZE, N, first_key, WINDOW), head,
            position, last_key, first_key, seq_len, first, stop, scale,
            KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, WINDOW, SOFTCAP, VALUE_DIM, N, D,
            MASKED=part != 1,
        )  # fmt: skip
    return acc, score_max, weight_sum


@triton.jit
def _key_tiles(
    position, num_keys, stop, split, splits,
    WINDOW: tl.constexpr, SPLIT: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Return the first key that the query tile sees, and the key tiles of a split of its keys.

    They are [first, begin), which only a WINDOW leaves, [begin, end), and [end, last). Every query
    sees every key of [begin, end). These are divided among the splits; so without a WINDOW each
    has some. The first split has those before them as well, and the last one those after.

    Args:
        position: of the first query.
        num_keys: keys up to the last query.
        stop: keys that the queries see, from key 0 on.
    """
    first_key = 0
    first = 0
    begin = 0
    end = (position + 1) // N
    last = tl.cdiv(stop, N)
    if WINDOW is not None:
        first_key = tl.maximum(position - WINDOW + 1, 0)
        first = first_key // N
        begin = tl.minimum(tl.cdiv(tl.maximum(num_keys - WINDOW, 0), N), end)
    if SPLIT:
        tiles = end - begin
        unsplit = begin
        begin = unsplit + tiles * split // splits
        end = unsplit + tiles * (split + 1) // splits
        last = tl.where(split == splits - 1, last, end)
        if WINDOW is not None:
            first = tl.where(split == 0, first, begin)
    return first_key, first, begin, end, last


@triton.jit(do_not_specialize_on_alignment=["merges"])
def _merge_prefill(
    out, sinks, partial_out, partial_stats, merges,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one query token for one KV head. An entry has _MERGED_TOKENS programs."""
    head = tl.program_id(0) % KV_HEADS
    index = tl.program_id(0) // KV_HEADS
    entry = merges + index // _MERGED_TOKENS * 4
    token = index % _MERGED_TOKENS
    splits = tl.load(entry + 2)
    if token < tl.load(entry + 1):
        place = ((tl.load(entry) + token).to(tl.int64) * KV_HEADS + head) * GROUP
        partial = ((tl.load(entry + 3) + token * splits) * KV_HEADS + head) * GROUP
        merge(
            out + place * HEAD_DIM, partial_out, partial_stats, partial, splits, sinks, head,
            KV_HEADS=KV_HEADS, GROUP=GROUP, HEAD_DIM=HEAD_DIM, D=D,
        )  # fmt: skip
