"""Paged attention in Triton agrees with float64. Without a GPU the kernels are interpreted, and
bfloat16 is left out: the interpreter computes it wrongly.
"""

import dataclasses
import functools
import itertools
import random

import numpy
import pytest
import torch

from nanovllm.kernels.triton import decode_attention, prefill_attention
from nanovllm.kernels.triton.decode_attention import SPLIT_TOKENS, most_splits
from nanovllm.kernels.triton.online_softmax import MAX_SPLITS, Scores
from tests.attention.cases import contiguous_sdpa, make_case, random_rows, reference
from tests.closeness import assert_close
from tests.kernels.triton.inputs import (
    CAPABILITY,
    CUDA,
    DEVICE,
    DTYPES,
    PLATFORM,
    each_dtype,
    few_dtypes,
    has_fp8,
)
from tests.kernels.triton.interpreter import patch_interpreter

NAN = float("nan")

patch_interpreter()


def case_of(rows, num_kv_heads, group, head_dim, block_size, dtype=torch.float32, seed=0):
    """Make a case in which reading anything but a row's own keys gives NaN or fails."""
    return make_case(rows, num_kv_heads, group, head_dim, block_size, dtype, seed, NAN, DEVICE)


def plan_of(case):
    """Return the decode plan and the prefill plan."""
    spec, batch = case.spec, case.batch
    width = batch.block_tables.shape[1] * spec.block_size
    heads = spec.num_heads, spec.num_kv_heads, spec.head_dim
    scores = Scores(spec.scale, spec.window, spec.softcap, spec.value_dim)
    decode = decode_attention.plan_decode(batch.cu_seqlens_q, batch.seq_lens, width, *heads, scores)
    lens = batch.lengths
    return decode, prefill_attention.plan_prefill(*lens, *heads, spec.dtype, spec.device, scores)


def attend(case, cache=None, sinks=None):
    """Decode the rows of one token and prefill the others. Return NaN where neither writes."""
    batch = case.batch
    cache = case.stored() if cache is None else cache
    out = torch.full_like(case.q[..., : case.spec.output_dim], NAN).contiguous()
    decode, prefill = plan_of(case)
    decode.partial_out.fill_(NAN)
    decode_attention.decode(case.q, cache, batch.block_tables, decode, out, sinks)
    assert not decode.splits_done.any(), "the next layer must find no split done"
    assert not decode.splits_taken.any(), "the next layer must find a full queue"
    if prefill is not None:
        prefill.partial_out.fill_(NAN)
        prefill.partial_stats.fill_(NAN)
        lens = batch.cu_seqlens_q, batch.seq_lens
        more = prefill, out, sinks, batch.ends
        prefill_attention.prefill(case.q, cache, batch.block_tables, *lens, *more)
    return out


def assert_accurate(case, out):
    """Check that the error is at most twice that of torch on contiguous keys, plus 2 roundings.

    float32 may have 16 roundings: it is multiplied as three products of 11 bits.
    """
    exact = reference(case)
    roundings = 16 if out.dtype == torch.float32 else 2
    rounding = roundings * torch.finfo(out.dtype).eps * exact.abs().max()
    limit = 2 * (contiguous_sdpa(case) - exact).abs().max() + rounding
    assert out.dtype == case.q.dtype
    assert_close(out, exact, atol=limit, rows=case.token_names())


@pytest.mark.thinned(5)
@each_dtype
@pytest.mark.parametrize(
    ("head_dim", "block_size"), [(16, 1), (64, 16), (80, 24), (96, 64), (128, 128), (256, 256)]
)
def test_mixed_batches(head_dim, block_size, dtype):
    chooser = random.Random(f"{head_dim} {dtype}")
    rows = [(min(query, 9), length) for query, length in random_rows(chooser.random(), 24)[:4]]
    group = chooser.randint(1, 8)
    case = case_of([*rows, (1, 290), (9, 40)], 2, group, head_dim, block_size, dtype)
    assert_accurate(case, attend(case))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("group", [*range(1, 9), 12, 130])
def test_groups(group):
    """A tile has empty rows if the group is not a power of two. 130 heads need a larger tile."""
    case = case_of([(5, 5), (1, 70), (4, 30)], 2, group, 32, 16, torch.float16, seed=group)
    assert_accurate(case, attend(case))


@pytest.mark.parametrize(
    "lengths",
    [
        (1, 2, 63, 64, 65),
        [splits * SPLIT_TOKENS + more for splits in (1, 2) for more in (-1, 0, 1)],
        [MAX_SPLITS * SPLIT_TOKENS + 300],
    ],
    ids=["tiles", "splits", "most splits"],
)
def test_single_tokens_at_the_edges_of_tiles_and_splits(lengths):
    case = case_of([(1, length) for length in lengths], 1, 2, 16, 64)
    assert_accurate(case, attend(case))


@pytest.mark.parametrize("group", [1, 3])
def test_chunks_at_the_edges_of_tiles(group):
    """Tiles have 16 query rows in float32 and 128 in float16, and 32 keys."""
    case = case_of([(2, 33), (15, 15), (16, 40), (17, 64), (5, 6), (2, 2)], 1, group, 16, 16)
    assert_accurate(case, attend(case))
    case = case_of([(127, 127), (128, 140), (129, 160), (43, 43)], 1, group, 16, 16, torch.float16)
    assert_accurate(case, attend(case))


@has_fp8
def test_float8_keys_and_values_are_widened():
    case = case_of([(1, 300), (20, 50), (1, 3)], 2, 2, 64, 64, torch.float16)
    narrow = case.stored().nan_to_num(0).to(torch.float8_e4m3fn)
    case.keys = [key.to(narrow.dtype).to(key.dtype) for key in case.keys]
    case.values = [value.to(narrow.dtype).to(value.dtype) for value in case.values]
    assert_accurate(case, attend(case, narrow))


# --- split keys of rows with several query tokens


MODELS = [(2, 128), (4, 128), (8, 128), (5, 128), (4, 64), (3, 128), (1, 128)]
"""Query heads to a KV head, and head_dim: Qwen3-0.6B, 8B, 32B and 14B, Llama-3.2-1B and 3B,
Llama-2-7B. (Llama-3.1-8B and 70B are like Qwen3-8B and 32B.)"""


@pytest.mark.thinned(3)
@each_dtype
@pytest.mark.parametrize(
    ("group", "head_dim"), MODELS if CAPABILITY > (0, 0) else [(2, 128), (5, 128), (4, 64)]
)
def test_chunks_after_a_long_prefix(group, head_dim, dtype):
    """Beside single tokens, a prompt and a chunk after a short prefix."""
    rows = [(1, 300), (5, 1100), (3, 3), (18, 1060), (4, 200)]
    case = case_of(rows, 1, group, head_dim, 64, dtype)
    (launch,) = plan_of(case)[1].launches
    assert {row for row, _, _, splits, _ in launch.tiles.tolist() if splits > 1} == {1, 3}
    assert_accurate(case, attend(case))


@pytest.mark.long
@few_dtypes
def test_a_chunk_after_32k_tokens(dtype):
    case = case_of([(3, 32770)], 1, 2, 16, 256, dtype)
    (launch,) = plan_of(case)[1].launches
    assert len(launch.tiles) == MAX_SPLITS
    assert_accurate(case, attend(case))


def test_split_chunks_at_the_edges_of_key_tiles():
    """Tiles have 8 tokens here, and 32 keys. The first token of a tile may see fewer key tiles than
    the others: a split without a key for it would give NaN.
    """
    for computed in (1054, 1055):
        case = case_of([(17, computed + 17)], 1, 2, 16, 16)
        assert_accurate(case, attend(case))


# --- a row does not depend on the rest of the batch


def part_of(case, rows):
    """Return a case with the given rows of `case`: (index, first token, end token) each.

    It uses the cache of `case`, `case.stored()`. Its block tables are as wide as its rows need.
    """
    lengths = [
        (stop - first, case.batch.lengths.seq_lens[row] - case.batch.lengths.query_lens[row] + stop)
        for row, first, stop in rows
    ]
    spec = case.spec
    part = case_of(lengths, 1, 1, 16, spec.block_size)
    width = max(-(-length // spec.block_size) for _, length in lengths)
    tables = case.batch.block_tables[[row for row, *_ in rows], :width]
    starts = case.batch.cu_seqlens_q.tolist()
    q = torch.cat([case.q[starts[row] + first : starts[row] + stop] for row, first, stop in rows])
    return dataclasses.replace(
        case, q=q, batch=dataclasses.replace(part.batch, block_tables=tables)
    )


@pytest.mark.parametrize("options", [{}, {"window": 70, "softcap": 20.0, "sinks": True}], ids=str)
def test_a_row_is_the_same_in_every_batch(options, monkeypatch):
    """A row has the same bits alone, in another order, and with a narrower block table."""
    monkeypatch.setattr(numpy, "matmul", functools.partial(numpy.einsum, "mk,kn->mn"))
    rows = [(1, 520), (1, 256), (40, 100), (1, 257), (3, 3), (1, 1), (9, 1100), (9, 70)]
    case = case_of(rows, 1, 2, 32, 16, torch.float16)
    case.spec = dataclasses.replace(case.spec, **options)
    sinks = torch.tensor([1.0, -2.0], device=DEVICE) if options else None
    cache = case.stored()
    expected = attend(case, cache, sinks).split([query for query, _ in rows])
    for order in ([3, 0, 7, 6, 2, 5, 1, 4], *([row] for row in range(0, len(rows), 2))):
        part = part_of(case, [(row, 0, rows[row][0]) for row in order])
        got = attend(part, cache, sinks).split(part.batch.lengths.query_lens)
        assert all(torch.equal(got[i], expected[row]) for i, row in enumerate(order))


@pytest.mark.parametrize("dtype", DTYPES[:1], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize(("group", "block_size"), [(3, 64)])
def test_rows_that_share_blocks_read_them_once_and_change_no_bit(
    group, block_size, dtype, monkeypatch
):
    """Row 2 has two tokens. Row 4 differs in the last block of its second split; row 6 is a split
    and no more.
    """
    products = []

    def einsum(x, y, dtype=None):
        products.append(x.shape)
        return numpy.einsum("mk,kn->mn", x, y, dtype=dtype)

    monkeypatch.setattr(numpy, "matmul", einsum)
    rows = [(1, 700), (1, 650), (2, 600), (1, 600), (1, 520), (1, 80), (1, 256), (1, 512), (1, 770)]
    case = case_of(rows, 1, group, 16, block_size, dtype)
    cache, tables = case.stored(), case.batch.block_tables
    attend(case, cache)
    apart = len(products)
    for row, (_, length) in enumerate(rows):
        blocks = min(length, 512) // block_size - (row == 4)
        tables[row, :blocks] = tables[0, :blocks]
    products.clear()
    expected = attend(case, cache).split([query for query, _ in rows])
    assert len(products) < apart or CAPABILITY > (0, 0)
    for row, (query, _) in enumerate(rows):
        if query == 1:
            assert torch.equal(attend(part_of(case, [(row, 0, 1)]), cache), expected[row])


def test_programs_that_process_many_splits_give_the_same_bits(monkeypatch):
    case = case_of([(1, n) for n in (300, 5, 600, 257, 1)], 2, 2, 16, 64)
    expected = attend(case)
    for programs in (1, 5):  # programs per SM of a GPU with one SM
        monkeypatch.setattr(decode_attention, "_multiprocessors", lambda device: 1)
        monkeypatch.setattr(decode_attention, "_PROGRAMS_PER_SM", programs)
        assert plan_of(case)[0].max_programs == programs
        assert torch.equal(attend(case), expected)


def test_more_split_rows_than_the_scratch_holds_take_several_launches(monkeypatch):
    case = case_of([(5, 5), (2, 1100), (7, 1400), (1, 9), (3, 1030), (2, 2)], 1, 2, 16, 64)
    expected, plan = attend(case), plan_of(case)[1]
    assert len(plan.launches) == 1
    assert len(plan.partial_out) == 2 * (2 + 7 + 3)
    monkeypatch.setattr(prefill_attention, "_MAX_PARTIAL_ROWS", 2 * 2 * 7)
    plan = plan_of(case)[1]
    assert [sorted(set(launch.tiles[:, 0].tolist())) for launch in plan.launches] == [
        *([0, 1], [2], [4, 5])
    ]
    assert len(plan.partial_out) == 2 * 7
    assert torch.equal(attend(case), expected)


@pytest.mark.parametrize("dtype", DTYPES if CUDA else [torch.float16])
@pytest.mark.parametrize("options", [{}, {"window": 70, "softcap": 20.0}], ids=str)
def test_a_prompt_is_the_same_whole_and_in_chunks(options, dtype, monkeypatch):
    """Results are equal bit for bit. Only a chunk of one token, which is decoded, may differ.

    In BLAS the rounding of a row depends on its place in the matrix. In tensor cores and einsum it
    does not, so the interpreter uses einsum here.
    """
    einsum = functools.partial(numpy.einsum, "mk,kn->mn")
    monkeypatch.setattr(numpy, "matmul", einsum)
    whole = case_of([(150, 150)], 1, 3, 32, 16, dtype)
    whole.spec = dataclasses.replace(whole.spec, **options)
    cache, expected = whole.stored(), attend(whole)
    for borders in ([0, 2, 33, 97, 150], [0, 128, 149, 150]):
        for start, stop in itertools.pairwise(borders):
            got = attend(part_of(whole, [(0, start, stop)]), cache)
            if stop - start > 1:
                assert torch.equal(got, expected[start:stop])
            else:
                error = (got.double() - expected[start:stop].double()).abs().max()
                assert error <= 4 * torch.finfo(dtype).eps


def test_a_row_of_length_0_does_nothing():
    """A CUDA graph has one token for each row, and rows past the batch have length 0."""
    case = case_of([(1, 300), (1, 20), (1, 7), (1, 1)], 2, 2, 16, 16)
    cache, expected = case.stored(), attend(case)
    case.batch.seq_lens[2:] = 0
    case.batch.block_tables[2:] = 2**31 - 1
    out = attend(case, cache)
    assert torch.equal(out[:2], expected[:2])
    assert out[2:].isnan().all()
    case.batch.seq_lens.zero_()
    assert attend(case, cache).isnan().all()


def test_slots_past_32_bits():
    """The blocks are the last of a cache, where the offset of a key does not fit into 32 bits."""
    case = case_of([(1, 20), (2, 30)], 8, 1, 256, 64, torch.float16)
    num_blocks = 2**31 // (64 * 8 * 256) + 16
    cache = PLATFORM.zeros((2, num_blocks, 64, 8, 256), torch.float16)
    moved = num_blocks - case.cache.shape[1]
    cache[:, moved:] = case.stored()
    case.batch.block_tables[:, :1] += moved
    assert_accurate(case, attend(case, cache))


# --- the plan


def test_splits_are_sorted_by_length_and_cover_each_row():
    chooser = random.Random(0)
    rows = [(chooser.choice([1, 1, 1, 2]), chooser.randint(2, 20000)) for _ in range(150)]
    starts = torch.tensor([0, *(query for query, _ in rows)]).cumsum(0)
    lengths = torch.tensor([length for _, length in rows])
    lengths[40] = 0
    plan = decode_attention.plan_decode(
        starts.int().to(DEVICE), lengths.int().to(DEVICE), 20000, 2, 1, 16
    )
    splits = plan.splits[: plan.num_splits.item()].tolist()
    expected = []
    for row, (query_len, _) in enumerate(rows):
        length = lengths[row].item()
        count = -(-length // split_size(length)) if query_len == 1 else 0
        expected += [[row, split, length, starts[row].item()] for split in range(count)]
    assert sorted(splits) == expected
    sizes = [split_size(length) for _, _, length, _ in splits]
    assert sizes == sorted(sizes, reverse=True)


def split_size(length):
    """Return the keys of a split of a row."""
    return max(SPLIT_TOKENS, -(-length // (64 * MAX_SPLITS)) * 64)


def test_a_plan_has_room_for_the_splits_of_shorter_rows():
    most = 0
    for length in range(1, 20000):
        most = max(most, -(-length // split_size(length)))
        assert most <= most_splits(length)
    samples = {1: 1, 256: 1, 257: 2, 600: 3, 1024: 4, 2048: 8, 2049: 9, 8192: 32, 20000: 32}
    assert {length: most_splits(length) for length in samples} == samples


def plan_tiles(rows, num_heads=16, num_kv_heads=8):
    """Return the tiles of the one launch for `rows`, at a head_dim of 128 in float16."""
    lens = zip(*rows, strict=True)
    heads = num_heads, num_kv_heads, 128
    plan = prefill_attention.plan_prefill(*lens, *heads, torch.float16, torch.device("cpu"))
    assert plan is not None
    (launch,) = plan.launches
    return launch.tiles.tolist(), launch.merges.tolist()


def test_query_tiles_cover_the_chunks_and_start_with_the_most_keys():
    tiles, merges = plan_tiles([(1, 900), (100, 100), (200, 1200), (1, 1), (2, 64)])
    assert [(row, first) for row, first, *_ in tiles] == [
        *((2, 192), (2, 128), (2, 64), (2, 0), (1, 64), (1, 0), (4, 0))
    ]
    assert all(splits == 1 for *_, splits, _ in tiles)
    assert merges == []
    single = prefill_attention.plan_prefill(
        (1, 1), (5, 9), 2, 1, 16, torch.float16, torch.device("cpu")
    )
    assert single is None


def test_a_split_chunk_has_a_place_for_each_token_and_split():
    """64 tokens after 32k keys are one tile for each of 8 KV heads, so 32 splits; 1024 tokens are
    16 tiles, and more are not split.
    """
    tiles, merges = plan_tiles([(64, 32768 + 64)])
    assert [tile[:4] for tile in tiles] == [[0, 0, split, 32] for split in range(32)]
    assert merges == [[first, 8, 32, 32 * first] for first in range(0, 64, 8)]
    tiles, merges = plan_tiles([(1, 1), (70, 5000), (3, 1024 + 3)])
    assert sorted(tiles) == [
        *([1, first, split, 9, first * 9] for first in (0, 64) for split in range(9)),
        *([2, 0, split, 2, 70 * 9] for split in range(2)),
    ]
    assert merges[-2:] == [[1 + 64, 6, 9, 64 * 9], [1 + 70, 3, 2, 70 * 9]]
    for query_len, splits in ((1024, 2), (1025, 1)):
        assert {tile[3] for tile in plan_tiles([(query_len, 40000)])[0]} == {splits}
