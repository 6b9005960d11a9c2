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
    finish_split,
    load_queries,
    padded,
    register_limit,
    store_result,
)

SPLIT_TOKENS = 256
"""Maximum keys in a split, unless the row would then need more than MAX_SPLITS."""

_PROGRAMS_PER_SM = 3
"""Programs of a launch for each SM, as many as it runs at once in half precision. Each takes splits
from a queue until none is left."""
_PLAN_ROWS = tl.constexpr(16)
"""Rows that one program of `_plan_decode` plans."""
_PLAN_COLUMNS = tl.constexpr(128)
"""Rows that it compares them with at once."""
_MAX_SPLITS = tl.constexpr(MAX_SPLITS)
_SPLIT_TOKENS = tl.constexpr(SPLIT_TOKENS)


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

    splits: torch.Tensor
    """[R * max_splits, 4] int32: row, split of the row, seq_len, query token; longest first."""
    num_splits: torch.Tensor
    """[1] int32, the number of entries in `splits`."""
    splits_taken: torch.Tensor
    """[1] int32, the splits that programs have taken after their first; 0 between two launches."""
    splits_done: torch.Tensor
    """[R, groups] int32, the finished splits of a row; 0 between two launches."""
    partial_out: torch.Tensor
    """[R, max_splits, num_heads, output_dim] float32, the weighted sum of values of each split."""
    partial_stats: torch.Tensor
    """[R, max_splits, num_heads, 2] float32: maximum score (log2), and sum of weights."""
    max_splits: int
    max_programs: int
    scores: Scores
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

    Rows with more query tokens, or of length 0, have no splits. The splits of a row depend on its
    own length only. They divide the keys that it sees.

    Args:
        cu_seqlens_q: [R + 1] int32.
        seq_lens: [R] int32, at most `max_seq_len`.
        max_seq_len: together with R, it determines the shapes of the plan and of every launch.
    """
    rows, device = len(seq_lens), seq_lens.device
    max_splits = splits_of_row(scores.visible(max_seq_len))
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
        launch=Launch(_decode),
    )
    _plan_decode[(triton.cdiv(rows, _PLAN_ROWS.value),)](
        cu_seqlens_q, seq_lens, plan.splits, plan.num_splits, plan.splits_taken, plan.splits_done,
        rows, KV_HEADS=groups, WINDOW=scores.window,
    )  # fmt: skip
    return plan


def splits_of_row(keys: int) -> int:
    """Return the number of splits of a row that sees `keys` keys. It never falls with them."""
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
        kv_cache: [2, num_blocks, block_size, num_kv_heads, head_dim], `q`'s dtype or float8_e4m3fn;
            [1, ...] of `q`'s dtype and one KV head if the plan's values are a part of the keys.
        block_tables: [R, width] int32. Columns past a row's last block are not read, nor those
            before a window.
        out: [T, num_heads, output_dim]. Only the tokens of the plan's rows are written.
        sinks: [num_heads] float32, a logit more in the denominator of each head's softmax.
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
    rows = max(8, triton.next_power_of_2(group))
    warps = 8 if rows * padded(output_dim) > 4096 else 4
    options = {"N": min(64, max(16, 16384 // row_bytes)), "num_warps": warps, "num_stages": 3}
    options["M"] = rows
    return options | ({"maxnreg": 168} if dtype.itemsize == 2 and output_dim <= 128 else {})


@triton.jit
def _visible(seq_len, WINDOW: tl.constexpr):
    """Return what `Scores.visible` returns."""
    return seq_len if WINDOW is None else tl.minimum(seq_len, WINDOW)


@triton.jit
def _splits_of_row(keys):
    """Return what `splits_of_row` returns."""
    return tl.minimum(tl.cdiv(keys, _SPLIT_TOKENS), _MAX_SPLITS)


@triton.jit
def _load_rows(cu_seqlens_q, seq_lens, row, num_rows, WINDOW: tl.constexpr):
    """Return the first query token, length, number of splits and keys per split of each row.

    Rows past `num_rows` and rows without exactly one query token have 0 splits.
    """
    inside = row < num_rows
    token = tl.load(cu_seqlens_q + row, mask=inside, other=0)
    stop = tl.load(cu_seqlens_q + row + 1, mask=inside, other=0)
    seq_len = tl.load(seq_lens + row, mask=inside, other=0)
    keys = _visible(seq_len, WINDOW)
    splits = tl.where(stop - token == 1, _splits_of_row(keys), 0)
    return token, seq_len, splits, tl.cdiv(keys, tl.maximum(splits, 1))


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
    splits, num_splits, splits_taken, splits_done, partial_out, partial_stats, max_splits, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Process splits, each for one KV head. The M rows of a tile are the head's query heads.

    A program's first split has the program's number. The others come from the queue: each is taken
    while the block table of the one before is on its way, and looked up while results are stored.
    """
    OUT_DIM: tl.constexpr = HEAD_DIM if VALUE_DIM is None else VALUE_DIM
    member = tl.arange(0, M)
    programs, index = tl.num_programs(0), tl.program_id(0)
    join_chain(CHAINED)
    # Loaded before it is known that there is such a split, so that the two loads do not take turns.
    # ptxas would let them, if the test did not need both. No split has seq_len 0.
    row, split, seq_len, token = _load_entry(splits, index // KV_HEADS, True)
    total = tl.load(num_splits) * KV_HEADS
    while (index < total) & (seq_len != 0):
        head = index % KV_HEADS
        begin = 0 if WINDOW is None else tl.maximum(seq_len - WINDOW, 0)
        unseen = begin // N
        tiles, count = tl.cdiv(seq_len, N) - unseen, _splits_of_row(_visible(seq_len, WINDOW))
        first, last = unseen + tiles * split // count, unseen + tiles * (split + 1) // count
        table = block_tables + row.to(tl.int64) * table_stride
        block = block_ids(table, first, last, seq_len, BLOCK_SIZE, N, begin, WINDOW)
        first_head = (token.to(tl.int64) * KV_HEADS + head) * GROUP
        heads = first_head + member
        queries, rest, place, mask = load_queries(q, heads, member < GROUP, HEAD_DIM, VALUE_DIM, D)
        index = total
        if total > programs:
            # Each program finds the queue empty once. The last to do so leaves it as it was.
            index = programs + tl.atomic_add(splits_taken, 1, sem="relaxed")
            if index == total + programs - 1:
                tl.store(splits_taken, 0)
        acc, score_max, weight_sum = attend(
            tl.zeros([M, D], tl.float32), tl.full([M], float("-inf"), tl.float32),
            tl.zeros([M], tl.float32), queries, rest, k_cache, v_cache, table, block, head,
            tl.full([M], 0, tl.int32) + seq_len - 1, begin, seq_len, first, last, scale,
            KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, WINDOW, SOFTCAP, VALUE_DIM, N, D, True,
        )  # fmt: skip
        next_row, next_split, next_seq_len, next_token = _load_entry(
            splits, index // KV_HEADS, index < total
        )
        if count == 1:
            store_result(
                out + place, acc, score_max, weight_sum, sinks, head * GROUP + member,
                member < GROUP, mask,
            )  # fmt: skip
        else:
            finish_split(
                out + first_head * OUT_DIM, partial_out, partial_stats,
                (row.to(tl.int64) * max_splits * KV_HEADS + head) * GROUP,
                ((row.to(tl.int64) * max_splits + split) * KV_HEADS + head) * GROUP,
                count, splits_done + row * KV_HEADS + head, acc, score_max, weight_sum, sinks, head,
                KV_HEADS, GROUP, OUT_DIM, M, D, AT_ONCE=4 if GROUP <= 4 else 2,
            )  # fmt: skip
        row, split, seq_len, token = next_row, next_split, next_seq_len, next_token


@triton.jit
def _load_entry(splits, index, valid):
    """Return row, split of the row, sequence length and query token of an entry of `splits`."""
    entry = splits + index * 4
    row = tl.load(entry, mask=valid, other=0)
    split = tl.load(entry + 1, mask=valid, other=0)
    seq_len = tl.load(entry + 2, mask=valid, other=0)
    return row, split, seq_len, tl.load(entry + 3, mask=valid, other=0)
