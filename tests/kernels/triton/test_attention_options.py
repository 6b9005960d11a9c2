"""Windows, softcaps, sinks, scales, wide heads and caches whose blocks lie apart: attention in
Triton agrees with float64. Without a GPU the kernels are interpreted.
"""

import dataclasses
import functools
import itertools

import numpy
import pytest
import torch

from nanovllm.kernels.triton import decode_attention, prefill_attention
from nanovllm.kernels.triton.online_softmax import Scores
from tests.attention.cases import OUT_OF_RANGE, make_case
from tests.closeness import assert_close
from tests.kernels.triton.inputs import DEVICE, each_dtype, randn
from tests.kernels.triton.interpreter import patch_interpreter

NAN = float("nan")
MIXED = [(1, 300), (1, 40), (9, 40), (3, 3), (1, 1), (20, 60), (1, 16)]
"""Single tokens, chunks after a prefix, and whole prompts."""

pytestmark = [  # the results of a tile's empty rows, and of a sink that outweighs all keys
    pytest.mark.filterwarnings("ignore:invalid value encountered in divide"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp2"),
]
patch_interpreter()


def case_of(rows, num_kv_heads, group, head_dim, block_size, dtype=torch.float32, **options):
    """Make a case whose sinks, if any, are random; return it with the cache that holds all keys.

    Keys before the window of a row's first token are NaN. The block table has no block for them
    where a block has no others.
    """
    case = make_case(rows, num_kv_heads, group, head_dim, block_size, dtype, 0, NAN, DEVICE)
    case.spec = dataclasses.replace(case.spec, **options)
    cache, tables = case.stored(), case.batch.block_tables
    if value_dim := case.spec.value_dim:
        cache = cache[:1]
        case.values = [keys[..., -value_dim:] for keys in case.keys]
    for row, (query_len, seq_len) in enumerate(rows):
        unseen = max(seq_len - query_len + 1 - (case.spec.window or seq_len), 0)
        keys = torch.arange(unseen, device=DEVICE)
        cache[:, tables[row, keys // block_size].long(), keys % block_size] = NAN
        tables[row, : unseen // block_size] = OUT_OF_RANGE[row % 2]
    sinks = randn(case.spec.num_heads) * 2 if case.spec.sinks else None
    return case, cache, sinks


def plans_of(case):
    spec, batch = case.spec, case.batch
    scores = Scores(spec.scale, spec.window, spec.softcap, spec.value_dim)
    heads = spec.num_heads, spec.num_kv_heads, spec.head_dim
    width = batch.block_tables.shape[1] * spec.block_size
    decode = decode_attention.plan_decode(batch.cu_seqlens_q, batch.seq_lens, width, *heads, scores)
    lens = batch.lengths
    return decode, prefill_attention.plan_prefill(*lens, *heads, spec.dtype, spec.device, scores)


def attend(case, cache, sinks):
    batch = case.batch
    out = torch.full_like(case.q[..., : case.spec.output_dim], NAN).contiguous()
    decode, prefill = plans_of(case)
    decode.partial_out.fill_(NAN)
    decode_attention.decode(case.q, cache, batch.block_tables, decode, out, sinks)
    assert not decode.splits_done.any()
    if prefill is not None:
        prefill.partial_out.fill_(NAN)
        lens = batch.cu_seqlens_q, batch.seq_lens
        prefill_attention.prefill(case.q, cache, batch.block_tables, *lens, prefill, out, sinks)
    return out


def reference(case, sinks):
    """Return attention in float64, one token at a time."""
    spec, token = case.spec, 0
    out = torch.empty(*case.q.shape[:2], spec.output_dim, dtype=torch.float64, device=DEVICE)
    group = spec.num_heads // spec.num_kv_heads
    for keys, values, query_len in zip(
        case.keys, case.values, case.batch.lengths.query_lens, strict=True
    ):
        for seen in range(len(keys) - query_len + 1, len(keys) + 1):
            first = max(seen - (spec.window or seen), 0)
            k, v = (x[first:seen].double().repeat_interleave(group, 1) for x in (keys, values))
            scores = torch.einsum("khd,hd->hk", k, case.q[token].double())
            scores *= spec.head_dim**-0.5 if spec.scale is None else spec.scale
            if spec.softcap:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None]], 1)
            weights = torch.softmax(scores, 1)[:, : len(k)]
            out[token] = torch.einsum("hk,khd->hd", weights, v)
            token += 1
    return out


def assert_accurate(case, cache, sinks):
    out, exact = attend(case, cache, sinks), reference(case, sinks)
    roundings = 4
    if out.dtype == torch.float32:  # a softcap's tanh is a difference of numbers near 1
        roundings = 64 if case.spec.softcap else 16
    limit = roundings * torch.finfo(out.dtype).eps * exact.abs().max()
    assert out.dtype == case.q.dtype
    assert_close(out, exact, atol=limit, rows=case.token_names())


# --- windows


@pytest.mark.thinned(3)
@each_dtype
@pytest.mark.parametrize(
    ("window", "group", "block_size"),
    [(1, 2, 16), (5, 1, 24), (16, 8, 16), (33, 3, 64), (999, 2, 8)],
)
def test_windows(window, group, block_size, dtype):
    assert_accurate(*case_of(MIXED, 2, group, 64, block_size, dtype, window=window))


def test_windows_at_the_edges_of_tiles():
    """Tiles have 32 keys, or 64 for single tokens, and 16 queries."""
    for window in (31, 32, 33, 65):
        rows = [(1, 64), (1, 65), (1, 97), (17, 64), (33, 33)]
        assert_accurate(*case_of(rows, 1, 1, 16, 16, window=window))


@pytest.mark.parametrize("sinks", [False, True])
def test_windows_over_several_splits(sinks):
    rows = [(1, 900), (1, 300), (5, 3000), (3, 1300)]
    case, *rest = case_of(rows, 1, 2, 16, 64, window=1100, sinks=sinks)
    decode, prefill = plans_of(case)
    assert decode.max_splits == 5  # of 1100 keys
    assert decode.num_splits.item() == 4 + 2
    (launch,) = prefill.launches
    assert {tuple(tile[:1] + tile[3:4]) for tile in launch.tiles.tolist()} == {(2, 2), (3, 2)}
    assert_accurate(case, *rest)


def test_a_long_row_with_a_short_window_has_one_split():
    case, *rest = case_of([(1, 9000), (2, 9000)], 1, 2, 16, 64, window=100)
    decode, prefill = plans_of(case)
    assert decode.max_splits == decode.num_splits.item() == 1
    assert len(prefill.partial_out) == 0
    assert_accurate(case, *rest)


# --- scores


@pytest.mark.thinned(3)
@each_dtype
@pytest.mark.parametrize("length", [70, 1100], ids=["one split", "splits"])
def test_softcaps_sinks_and_scales(length, dtype):
    rows = [(1, length), (4, length), (1, 5)]
    for options in (
        {"softcap": 5.0, "scale": 0.3},
        {"sinks": True},
        {"softcap": 30.0, "window": 600, "scale": 1.0},
        {"sinks": True, "window": 40},
    ):
        assert_accurate(*case_of(rows, 1, 4, 32, 16, dtype, **options))


def test_a_sink_may_be_far_from_all_scores():
    case, cache, _ = case_of([(1, 300), (4, 30)], 1, 2, 16, 16, sinks=True)
    sinks = torch.tensor([-1e4, 1e4], device=DEVICE)
    out = attend(case, cache, sinks)
    assert torch.equal(out[:, 0], attend(case, cache, None)[:, 0])
    assert (out[:, 1] == 0).all()


@pytest.mark.thinned(3)
@each_dtype
@pytest.mark.parametrize(
    ("heads", "head_dim", "value_dim", "options"),
    [
        (20, 96, 64, {"scale": 0.1}),
        (40, 72, 56, {"window": 30, "sinks": True}),
    ],
)
def test_values_in_keys(heads, head_dim, value_dim, options, dtype):
    """Of one KV head; 20 query heads are divided into two tiles, 40 into four. One row is split."""
    rows = [(1, 300), (1, 3), (2, 1030), (9, 9)]
    assert_accurate(*case_of(rows, 1, heads, head_dim, 16, dtype, value_dim=value_dim, **options))


@pytest.mark.thinned(4)
@pytest.mark.parametrize("head_dim", [512, 256, 384])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["float16", "float32"])
def test_wide_heads(head_dim, dtype):
    rows = [(1, 150), (5, 40), (1, 3)]
    for group, options in ((8, {"scale": 1.0 / 16}), (1, {"window": 20, "softcap": 50.0})):
        assert_accurate(*case_of(rows, 1, group, head_dim, 64, dtype, **options))


# --- the result of a row


def part_of(case, row, first, stop):
    """Return the case of query tokens [first, stop) of a row alone."""
    query_len, seq_len = (lens[row] for lens in case.batch.lengths)
    part = make_case([(stop - first, seq_len - query_len + stop)], 1, 1, 16, case.spec.block_size)
    start = case.batch.cu_seqlens_q[row].item()
    case_part = dataclasses.replace(case, q=case.q[start + first : start + stop])
    tables = case.batch.block_tables[row : row + 1]
    case_part.batch = dataclasses.replace(
        part.batch,
        cu_seqlens_q=part.batch.cu_seqlens_q.to(DEVICE),
        seq_lens=part.batch.seq_lens.to(DEVICE),
        block_tables=tables,
    )
    return case_part


OPTIONS = {"window": 70, "softcap": 20.0, "sinks": True}


def test_a_row_is_the_same_in_every_batch():
    rows = [(1, 520), (40, 100), (1, 57), (3, 3), (1, 1), (9, 1100)]
    case, cache, sinks = case_of(rows, 1, 2, 32, 16, torch.float16, **OPTIONS)
    expected = attend(case, cache, sinks).split([query for query, _ in rows])
    for row, (query_len, _) in enumerate(rows):
        got = attend(part_of(case, row, 0, query_len), cache, sinks)
        assert torch.equal(got, expected[row])


def test_a_prompt_is_the_same_whole_and_in_chunks(monkeypatch):
    """See the test of the same name in test_attention.py."""
    monkeypatch.setattr(numpy, "matmul", functools.partial(numpy.einsum, "mk,kn->mn"))
    case, cache, sinks = case_of([(150, 150)], 1, 3, 32, 16, torch.float16, **OPTIONS)
    expected = attend(case, cache, sinks)
    for borders in ([0, 70, 150], [0, 2, 33, 97, 150]):
        for start, stop in itertools.pairwise(borders):
            got = attend(part_of(case, 0, start, stop), cache, sinks)
            assert torch.equal(got, expected[start:stop])


# --- a cache whose blocks lie apart


@pytest.mark.parametrize("block_size", [16, 24])
def test_blocks_that_lie_apart(block_size):
    case, cache, _ = case_of([(1, 300), (20, 50), (1, 3)], 2, 2, 32, block_size)
    size = cache[:, 0].numel()
    pages = torch.full((cache.shape[1], size + 48), NAN, device=DEVICE)
    apart = pages[:, 16 : 16 + size].view(-1, *cache[:, 0].shape).movedim(0, 1)
    apart.copy_(cache)
    assert not apart.is_contiguous()
    assert torch.equal(attend(case, apart, None), attend(case, cache, None))
