"""Windows, softcaps, sinks, scales, wide heads and caches whose blocks lie apart: attention in
Triton agrees with float64. Without a GPU the kernels are interpreted.
"""

import dataclasses

import pytest
import torch

from tests.attention.cases import OUT_OF_RANGE, make_case, reference
from tests.closeness import assert_close
from tests.kernels.triton.inputs import DEVICE, each_dtype, randn
from tests.kernels.triton.interpreter import patch_interpreter
from tests.kernels.triton.test_attention import attend, plan_of

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
    decode, prefill = plan_of(case)
    assert decode.max_splits == 5  # of 1100 keys
    assert decode.num_splits.item() == 4 + 2
    (launch,) = prefill.launches
    assert {tuple(tile[:1] + tile[3:4]) for tile in launch.tiles.tolist()} == {(2, 2), (3, 2)}
    assert_accurate(case, *rest)


def test_a_long_row_with_a_short_window_has_one_split():
    case, *rest = case_of([(1, 9000), (2, 9000)], 1, 2, 16, 64, window=100)
    decode, prefill = plan_of(case)
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


# --- pictures


@each_dtype
@pytest.mark.parametrize("window", [None, 20])
def test_tokens_of_a_picture_see_each_other(window, dtype):
    """Pictures that cross tiles of queries and keys; the last row has the end of one, in splits."""
    rows = [(70, 70), (1, 40), (9, 40), (12, 1400)]
    case, cache, sinks = case_of(rows, 2, 2, 16, 16, dtype, window=window, sees_pictures=True)
    ends = case.batch.positions.int() + 1
    ends[5:45], ends[46:66], ends[71:78], ends[80:90] = 45, 66, 38, 1398
    case.batch = dataclasses.replace(case.batch, ends=ends)
    assert_accurate(case, cache, sinks)
