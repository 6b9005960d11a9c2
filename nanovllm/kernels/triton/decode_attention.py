"""Paged attention for rows with one query token, in Triton: split KV, as in FlashDecoding.

The KV cache of a layer is [2, num_blocks, block_size, num_kv_heads, head_dim]; its blocks may lie
apart. Knows tensors only: no batches, no models. docs/cuda.md says how the sizes below
were chosen.
"""

import dataclasses
import functools

import torch
import triton
import triton.language as tl

from nanovllm.kernels.triton.launch import (
    Arguments,
    Launch,
    can_chain,
    join_chain,
    launch_options,
)
from nanovllm.kernels.triton.online_softmax import (
    MAX_SPLITS,
    PLAIN,
    Scores,
    attend,
    block_ids,
    block_stride,
    load_queries,
    merge_last,
    padded,
    register_limit,
    store_result,
    store_split,
)

SPLIT_TOKENS = 256  # maximum keys in a split, unless the row would then need more than MAX_SPLITS

_PROGRAMS_PER_SM = 3
"""Programs of a launch for each SM, as many as it runs at once in half precision. Each takes splits
from a queue until none is left."""
_PLAN_ROWS = tl.constexpr(16)  # rows that one program of `_plan_decode` plans
_PLAN_COLUMNS = tl.constexpr(128)  # rows that it compares them with at once
_MAX_SPLITS = tl.constexpr(MAX_SPLITS)
_SPLIT_TOKENS = tl.constexpr(SPLIT_TOKENS)
_TILE_TOKENS = tl.constexpr(64)
"""Splits are multiples of it, because a tile of keys has at most so many."""
_IDS_AT_ONCE = tl.constexpr(16)  # block ids of each row that are compared at once


# Values that change from batch to batch must not cause a recompilation. By default Triton compiles
# another kernel for an integer that is 1 or a multiple of 16, and for a pointer that is not aligned
# to 16 bytes.
_jit = triton.jit(
    do_not_specialize=["num_rows", "max_splits", "table_stride"],
    do_not_specialize_on_alignment=[
        *("cu_seqlens_q", "seq_lens", "block_tables"),
        *("splits", "num_splits", "splits_taken", "splits_done"),
    ],
)


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """The splits of a batch's rows with one query token, and scratch memory for their results.

    The layers of a step share one plan, so they must run one after another. Their caches have the
    same strides.
    """

    # [R * max_splits, 4] int32: row, split of the row, seq_len, query token; longest first.
    splits: torch.Tensor
    num_splits: torch.Tensor  # [1] int32, the number of entries in `splits`
    # [1] int32, the splits that programs have taken after their first; 0 between two launches.
    splits_taken: torch.Tensor
    # [R, groups] int32, the finished splits of a row; 0 between two launches.
    splits_done: torch.Tensor
    # [R, max_splits, num_heads, output_dim] float32, the weighted sum of values of each split.
    partial_out: torch.Tensor
    # [R, max_splits, num_heads, 2] float32: maximum score (log2), and sum of weights.
    partial_stats: torch.Tensor
    max_splits: int
    max_programs: int
    scores: Scores
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    launch: Launch


def plan_decode(
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scores: Scores = PLAIN,
) -> DecodePlan:
    """Return the splits of the rows that have one query token, computed on the device.

    Rows with more query tokens, or of length 0, have none. The splits of a row divide the keys that
    it sees, and depend on its own length only.

    Args:
        max_seq_len: of a row. Together with R, it determines the shapes of the plan and of every
            launch.
    """
    rows, device = len(seq_lens), seq_lens.device
    max_splits = most_splits(scores.visible(max_seq_len))
    groups = scores.groups(num_heads, num_kv_heads)
    output_dim = scores.output_dim(head_dim)
    per_head = (rows, max_splits, num_heads)
    plan = DecodePlan(
        splits=torch.empty(rows * max_splits, 4, dtype=torch.int32, device=device),
        num_splits=torch.empty(1, dtype=torch.int32, device=device),
        splits_taken=torch.empty(1, dtype=torch.int32, device=device),
        splits_done=torch.empty(rows, groups, dtype=torch.int32, device=device),
        partial_out=torch.empty(*per_head, output_dim, dtype=torch.float32, device=device),
        partial_stats=torch.empty(*per_head, 2, dtype=torch.float32, device=device),
        max_splits=max_splits,
        max_programs=_PROGRAMS_PER_SM * _multiprocessors(device),
        scores=scores,
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=seq_lens,
        launch=Launch(_decode),
    )
    _plan_decode[(triton.cdiv(rows, _PLAN_ROWS.value),)](
        cu_seqlens_q, seq_lens, plan.splits, plan.num_splits, plan.splits_taken, plan.splits_done,
        rows, KV_HEADS=groups, WINDOW=scores.window,
    )  # fmt: skip
    return plan


def most_splits(keys: int) -> int:
    """Return the number of splits that a row which sees up to `keys` keys has at most."""
    return int(min(triton.cdiv(keys, SPLIT_TOKENS), MAX_SPLITS))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 132  # an H100's; the interpreter runs any number of programs
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    plan: DecodePlan,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> None:
    """Compute attention for the rows of `plan`, as in FlashDecoding (Dao et al., 2023).

    The program that finishes a row's last split merges all splits of the row, in their order. So
    merging needs no second launch, and the result does not depend on which program is last.

    Args:
        q: [T, num_heads, head_dim].
        kv_cache: of `q`'s dtype or float8_e4m3fn; with one half, of `q`'s dtype and one KV head, if
            the plan's values are a part of the keys.
        block_tables: [R, width] int32. Columns past a row's last block or before a window are not
            read.
        out: [T, num_heads, output_dim]. Only the tokens of the plan's rows are written.
        sinks: [num_heads] float32; see `AttentionSpec`.
    """
    assert q.is_contiguous()
    k_cache = kv_cache[0]
    v_cache = kv_cache[-1]

    def arguments() -> Arguments:
        num_heads, head_dim = q.shape[1:]
        block_size, num_kv_heads = kv_cache.shape[2:4]
        groups = plan.scores.groups(num_heads, num_kv_heads)
        group = num_heads // groups
        output_dim = plan.scores.output_dim(head_dim)
        fixed = (
            block_tables, block_tables.stride(0),
            plan.splits, plan.num_splits, plan.splits_taken, plan.splits_done,
            plan.partial_out, plan.partial_stats, plan.max_splits,
            plan.cu_seqlens_q, plan.seq_lens, len(plan.seq_lens),
            plan.scores.factor(head_dim),
        )  # fmt: skip
        options = {
            "KV_HEADS": groups, "GROUP": group, "HEAD_DIM": head_dim,
            "BLOCK_SIZE": block_size, "BLOCK_STRIDE": block_stride(kv_cache),
            **plan.scores.constants(),
            "D": padded(output_dim), **_decode_options(q.dtype, output_dim, group),
            **register_limit(q.dtype, kv_cache), **launch_options(can_chain(q.device)),
        }  # fmt: skip
        grid = (min(len(plan.splits) * groups, plan.max_programs),)
        return Arguments(grid, fixed, options)

    plan.launch(q, k_cache, v_cache, out, sinks, arguments=arguments)


def _decode_options(dtype: torch.dtype, output_dim: int, group: int) -> dict[str, int]:
    """Return the launch options. M is the number of rows of a query tile, N that of keys in a tile.

    A tile of keys and values takes at most 32 KiB of shared memory (64 for 512 numbers of float32,
    because a tile has at least 16 keys), and loads of two are in flight. In half precision, 168
    registers let an SM run _PROGRAMS_PER_SM programs. Above a head_dim of 128 there is no limit:
    with this one ptxas takes more registers than without, and may spill a few. Four warps have
    registers for 4,096 sums of values.
    """
    row_bytes = padded(output_dim) * dtype.itemsize
    rows = max(16 if output_dim <= 256 else 8, triton.next_power_of_2(group))
    warps = 8 if rows * padded(output_dim) > 4096 else 4
    options = {"N": min(64, max(16, 16384 // row_bytes)), "num_warps": warps, "num_stages": 3}
    options["M"], options["ROWS"] = rows, 1 << ((rows // group).bit_length() - 1)
    return options | ({"maxnreg": 168} if dtype.itemsize == 2 and output_dim <= 128 else {})


@triton.jit
def _visible(seq_len, WINDOW: tl.constexpr):
    """Return what `Scores.visible` returns."""
    return seq_len if WINDOW is None else tl.minimum(seq_len, WINDOW)


@triton.jit
def _split_of_row(keys, WINDOW: tl.constexpr):
    """Return the number of splits of a row that sees `keys` keys, and the keys of each, at most.

    Without a window, rows of nearly the same length have the same borders.
    """
    if WINDOW is None:
        size = tl.cdiv(keys, _TILE_TOKENS * _MAX_SPLITS) * _TILE_TOKENS
        size = tl.maximum(size, _SPLIT_TOKENS)
        count = tl.cdiv(keys, size)
    else:
        count = tl.minimum(tl.cdiv(keys, _SPLIT_TOKENS), _MAX_SPLITS)
        size = tl.cdiv(keys, tl.maximum(count, 1))
    return count, size


@triton.jit
def _load_rows(cu_seqlens_q, seq_lens, row, num_rows, WINDOW: tl.constexpr):
    """Return the first query token, length, number of splits and keys per split of each row.

    Rows past `num_rows` and rows without exactly one query token have 0 splits.
    """
    inside = row < num_rows
    token = tl.load(cu_seqlens_q + row, mask=inside, other=0)
    stop = tl.load(cu_seqlens_q + row + 1, mask=inside, other=0)
    seq_len = tl.load(seq_lens + row, mask=inside, other=0)
    splits, size = _split_of_row(_visible(seq_len, WINDOW), WINDOW)
    return token, seq_len, tl.where(stop - token == 1, splits, 0), size


@_jit
def _plan_decode(
    cu_seqlens_q, seq_lens, splits, num_splits, splits_taken, splits_done, num_rows,
    KV_HEADS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """List the splits of _PLAN_ROWS rows. The splits of all rows with longer ones come before.

    This is a counting sort without communication: each program reads the lengths of all rows.
    """
    row = tl.program_id(0) * _PLAN_ROWS + tl.arange(0, _PLAN_ROWS)
    token, seq_len, count, split_len = _load_rows(cu_seqlens_q, seq_lens, row, num_rows, WINDOW)
    first = tl.zeros([_PLAN_ROWS], tl.int32)
    total = 0
    for start in range(0, num_rows, _PLAN_COLUMNS):
        other = start + tl.arange(0, _PLAN_COLUMNS)
        _, _, other_count, other_len = _load_rows(cu_seqlens_q, seq_lens, other, num_rows, WINDOW)
        longer = other_len[None, :] > split_len[:, None]
        same_but_earlier = (other_len[None, :] == split_len[:, None]) & (
            other[None, :] < row[:, None]
        )
        first += tl.sum(tl.where(longer | same_but_earlier, other_count[None, :], 0), axis=1)
        total += tl.sum(other_count)
    split = tl.arange(0, _MAX_SPLITS)[None, :]
    entry = splits + (first[:, None] + split) * 4
    mask = split < count[:, None]
    tl.store(entry, row[:, None], mask=mask)
    tl.store(entry + 1, split, mask=mask)
    tl.store(entry + 2, seq_len[:, None], mask=mask)
    tl.store(entry + 3, token[:, None], mask=mask)
    for head in range(KV_HEADS):
        tl.store(splits_done + row * KV_HEADS + head, 0, mask=row < num_rows)
    tl.store(num_splits, total, mask=tl.program_id(0) == 0)
    tl.store(splits_taken, 0, mask=tl.program_id(0) == 0)


@_jit
def _decode(
    q, k_cache, v_cache, out, sinks, block_tables, table_stride,
    splits, num_splits, splits_taken, splits_done, partial_out, partial_stats, max_splits,
    cu_seqlens_q, seq_lens, num_rows, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Process splits, each for one KV head. The M queries of a tile are the head's query heads of
    up to ROWS rows whose split has the same keys: the first of them takes it for all.

    A program's first split has the program's number. The others come from the queue: each is taken
    while the block table of the one before is on its way, and looked up while results are stored.
    """
    slot, member = tl.arange(0, M) // GROUP, tl.arange(0, M) % GROUP
    programs, index = tl.num_programs(0), tl.program_id(0)
    join_chain(CHAINED)
    # Loaded before it is known that there is such a split, so that the two loads do not take turns.
    # ptxas would let them, if the test did not need both. No split has seq_len 0.
    row, split, seq_len, token = _load_entry(splits, index // KV_HEADS, True)
    total = tl.load(num_splits) * KV_HEADS
    while (index < total) & (seq_len != 0):
        head = index % KV_HEADS
        begin = 0 if WINDOW is None else tl.maximum(seq_len - WINDOW, 0)
        first, last = _tiles_of_split(seq_len, split, begin, WINDOW, N)
        table = block_tables + row.to(tl.int64) * table_stride
        block = block_ids(table, first, last, seq_len, BLOCK_SIZE, N, begin, WINDOW)
        rows = row // ROWS * ROWS + slot
        tokens, valid = _rows_of_split(
            cu_seqlens_q, seq_lens, num_rows, block_tables, table_stride, row, split, seq_len,
            token, rows, slot < ROWS, GROUP, ROWS, BLOCK_SIZE, WINDOW,
        )  # fmt: skip
        index = total
        if total > programs:
            # Each program finds the queue empty once. The last to do so leaves it as it was.
            index = programs + tl.atomic_add(splits_taken, 1, sem="relaxed")
            if index == total + programs - 1:
                tl.store(splits_taken, 0)
        if tl.min(tl.where(valid, rows, row)) == row:
            heads = (tokens.to(tl.int64) * KV_HEADS + head) * GROUP + member
            queries, rest, _, _ = load_queries(q, heads, valid, HEAD_DIM, VALUE_DIM, D)
            # The slots of the rows, in one number, so that `attend` has more registers.
            which = tl.sum(tl.where(valid & (member == 0), 1 << slot, 0))
            last_key = tl.full([M], 0, tl.int32) + seq_len - 1
            acc, score_max, weight_sum = attend(
                tl.zeros([M, D], tl.float32), tl.full([M], float("-inf"), tl.float32),
                tl.zeros([M], tl.float32), queries, rest, k_cache, v_cache, table, block, head,
                last_key, last_key, begin, seq_len, first, last, scale,
                KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, WINDOW, SOFTCAP, VALUE_DIM, N, D,
                True,
            )  # fmt: skip
            _finish(
                out, partial_out, partial_stats, max_splits, splits_done, cu_seqlens_q, seq_lens,
                row, split, which, acc, score_max, weight_sum, sinks, head,
                KV_HEADS, GROUP, HEAD_DIM if VALUE_DIM is None else VALUE_DIM, WINDOW, M, ROWS, D,
            )  # fmt: skip
        row, split, seq_len, token = _load_entry(splits, index // KV_HEADS, index < total)


@triton.jit
def _tiles_of_split(seq_len, split, begin, WINDOW: tl.constexpr, N: tl.constexpr):
    """Return the first tile of keys of a split, and the one after its last. `begin` is the first
    key that the row sees.
    """
    count, size = _split_of_row(_visible(seq_len, WINDOW), WINDOW)
    if WINDOW is None:
        first = split * (size // N)
        last = tl.minimum(first + size // N, tl.cdiv(seq_len, N))
    else:
        unseen = begin // N
        tiles = tl.cdiv(seq_len, N) - unseen
        first = unseen + tiles * split // count
        last = unseen + tiles * (split + 1) // count
    return first, last


@triton.jit
def _rows_of_split(
    cu_seqlens_q, seq_lens, num_rows, block_tables, table_stride, row, split, seq_len, token,
    rows, inside, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Return which of the `rows` [M] that are `inside` have the split's keys in common with `row`,
    and their query tokens. They must see all of them. `row` itself is always one.

    Most rows have none in common, which the split's first block tells.
    """
    valid = inside & (rows == row)
    tokens = tl.where(valid, token, 0)
    if (ROWS > 1) & (WINDOW is None):
        _, size = _split_of_row(seq_len, WINDOW)
        others = _load_rows(cu_seqlens_q, seq_lens, rows, tl.where(inside, num_rows, 0), WINDOW)
        end = (split + 1) * size
        block, stop = split * size // BLOCK_SIZE, tl.cdiv(end, BLOCK_SIZE)
        own = block_tables + row.to(tl.int64) * table_stride
        tables = block_tables + rows.to(tl.int64) * table_stride
        # Of all rows, so that this load does not wait for that of the lengths.
        near = tl.load(tables + block, mask=inside & (rows < num_rows), other=-1) == tl.load(
            own + block
        )
        near = near & (others[2] > 0) & (others[3] == size)
        near = near & (end <= tl.minimum(others[1], seq_len))
        if tl.sum(near.to(tl.int32)) > GROUP:
            for first in range(block + 1, stop, _IDS_AT_ONCE):
                ids = first + tl.arange(0, _IDS_AT_ONCE)
                expected = tl.load(own + ids, mask=ids < stop, other=-1)
                mask = near[:, None] & (ids < stop)[None, :]
                found = tl.load(tables[:, None] + ids[None, :], mask=mask, other=-1)
                differs = mask & (found != expected[None, :])
                near = near & (tl.max(differs.to(tl.int32), 1) == 0)
        tokens = tl.where(near, others[0], tokens)
        valid = valid | near
    return tokens, valid


@triton.jit
def _finish(
    out, partial_out, partial_stats, max_splits, splits_done, cu_seqlens_q, seq_lens,
    row, split, which, acc, score_max, weight_sum, sinks, head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, OUT_DIM: tl.constexpr, WINDOW: tl.constexpr,
    M: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Store the results of rows that have one split. Store the split of the others, and merge the
    splits of those that it was the last of. The bits of `which` are the rows, from `row`'s
    multiple of ROWS on.
    """
    slot, member = tl.arange(0, M) // GROUP, tl.arange(0, M) % GROUP
    rows, valid = row // ROWS * ROWS + slot, (which >> slot & 1) == 1
    tokens = tl.load(cu_seqlens_q + rows, mask=valid, other=0)
    lens = tl.load(seq_lens + rows, mask=valid, other=0)
    counts, _ = _split_of_row(_visible(lens, WINDOW), WINDOW)
    first_head = (tokens.to(tl.int64) * KV_HEADS + head) * GROUP
    numbers = tl.arange(0, D)[None, :]
    if tl.min(tl.where(valid, counts, 2)) == 1:
        whole = counts == 1
        store_result(
            out + (first_head + member)[:, None] * OUT_DIM + numbers, acc, score_max, weight_sum,
            sinks, head * GROUP + member, whole, whole[:, None] & (numbers < OUT_DIM),
        )  # fmt: skip
    if tl.max(counts) > 1:
        part = counts > 1
        own = (rows.to(tl.int64) * max_splits + split) * KV_HEADS + head
        store_split(
            partial_out, partial_stats, own * GROUP + member, acc, score_max, weight_sum,
            part, part[:, None] & (numbers < OUT_DIM), OUT_DIM, D,
        )  # fmt: skip
        tl.debug_barrier()  # all threads must have stored before the splits count as done
        for place in range(row % ROWS, ROWS):
            if which >> place != 0:
                of_row = (slot == place) & part
                count = tl.max(tl.where(of_row, counts, 0))
                if count > 0:
                    row_head = tl.max(tl.where(of_row, first_head, 0))
                    done = row // ROWS * ROWS + place
                    merge_last(
                        out + row_head * OUT_DIM, partial_out, partial_stats,
                        (done.to(tl.int64) * max_splits * KV_HEADS + head) * GROUP, count,
                        splits_done + done * KV_HEADS + head, sinks, head,
                        KV_HEADS, GROUP, OUT_DIM, D, AT_ONCE=4 if GROUP <= 4 else 2,
                    )  # fmt: skip


@triton.jit
def _load_entry(splits, index, valid):
    """Return row, split of the row, sequence length and query token of an entry of `splits`."""
    entry = splits + index * 4
    row = tl.load(entry, mask=valid, other=0)
    split = tl.load(entry + 1, mask=valid, other=0)
    seq_len = tl.load(entry + 2, mask=valid, other=0)
    return row, split, seq_len, tl.load(entry + 3, mask=valid, other=0)
