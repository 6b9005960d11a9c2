"""The fused decode attention agrees with the store and with float64. Without a GPU it is
interpreted, and bfloat16 is left out: the interpreter computes it wrongly.
"""

import dataclasses

import pytest
import torch

from nanovllm.kernels.triton import fused_attention
from nanovllm.kernels.triton.online_softmax import MAX_SPLITS
from nanovllm.kernels.triton.store import store
from nanovllm.layers.rotary_embedding import RotaryEmbedding, inverse_frequencies
from tests.attention.cases import make_case
from tests.kernels.triton.inputs import DEVICE, each_half, randn
from tests.kernels.triton.interpreter import patch_interpreter
from tests.kernels.triton.test_attention import NAN, assert_accurate
from tests.kernels.triton.test_fused_layer import CHAINED

EPS = 1e-6

pytestmark = pytest.mark.usefixtures("inference_mode")
patch_interpreter()


class Case:
    """Rows of sequences: each (tokens in the batch, length), and random projections.

    What a row must not read is NaN. The store's keys and queries are what `reference` attends with.
    """

    def __init__(self, rows, kv_heads, group, head_dim, block_size, dtype, *, qk_norm=True):
        case = make_case(rows, kv_heads, group, head_dim, block_size, dtype, 0, NAN, DEVICE)
        batch = case.batch
        self.heads, self.cache = kv_heads * group, case.cache
        self.qkv = randn(len(case.q), (self.heads + 2 * kv_heads) * head_dim, dtype=dtype)
        self.weights = [
            randn(head_dim, dtype=dtype, seed=i) + 1 if qk_norm else None for i in (1, 2)
        ]
        self.cos_sin = RotaryEmbedding(8192, inverse_frequencies(head_dim, 1e6)).to(DEVICE).cos_sin
        lens = torch.tensor(batch.lengths.query_lens, device=DEVICE)
        tables = batch.block_tables.repeat_interleave(lens, 0)
        angle_rows = (batch.positions * 37 + 5) % 8192
        self.tokens = batch.positions, angle_rows, batch.slot_mapping, tables
        self.stored = case.cache.clone()
        norm = (*self.weights, EPS, self.cos_sin, *self.tokens[1:3])
        q = store(self.qkv, *norm, self.stored, self.heads)
        keys, values = self.stored.flatten(1, 2)
        new = zip(
            *(x[batch.slot_mapping].split(lens.tolist()) for x in (keys, values)), strict=True
        )
        for row, (k, v) in enumerate(new):
            case.keys[row][-len(k) :], case.values[row][-len(v) :] = k, v
        self.case = dataclasses.replace(case, q=q)

    def attend(self, order=None):
        """Return attention and the cache behind it; `order` is that of the rows in the batch."""
        order = torch.arange(len(self.qkv)) if order is None else order
        order = order.to(DEVICE)
        done = torch.zeros(len(order), self.cache.shape[3], dtype=torch.int32, device=DEVICE)
        places = (x[order] for x in self.tokens)
        cache = self.cache.clone()
        out = fused_attention.attend_rows(
            self.qkv[order], *self.weights, EPS, self.cos_sin, *places, cache,
            self.heads, done, chained=CHAINED,
        )  # fmt: skip
        assert not done.any(), "the next layer must find no split done"
        return out, cache

    def assert_stored(self, cache):
        """Check that the cache is what the store leaves, up to one rounding of the norm."""
        rounding = 2 * torch.finfo(cache.dtype).eps
        close = torch.isclose(cache, self.stored, rtol=rounding, atol=rounding, equal_nan=True)
        assert close.all()


@each_half
@pytest.mark.parametrize(
    ("head_dim", "block_size", "group", "qk_norm"),
    [
        (16, 1, 3, False),
        (64, 16, 2, True),
        (80, 24, 1, True),
        (80, 24, 1, False),
        (128, 64, 4, True),
        (16, 16, 20, True),  # a group larger than a tile
    ],
)
def test_rows_of_their_own(head_dim, block_size, group, qk_norm, dtype):
    rows = [(1, 1), (1, 70), (1, block_size), (1, block_size + 1), (1, 130)]
    case = Case(rows, 2, group, head_dim, block_size, dtype, qk_norm=qk_norm)
    out, cache = case.attend()
    assert_accurate(case.case, out)
    case.assert_stored(cache)
    if not qk_norm:  # then no sum has another order
        assert torch.equal(cache.nan_to_num(), case.stored.nan_to_num())


@each_half
def test_rows_of_one_sequence(dtype):
    """Drafts are rows that share a sequence. Neither row may read from the cache what another one
    stores: in reverse order the cache still holds NaN there.
    """
    case = Case([(2, 2), (3, 66), (1, 5), (2, 131)], 1, 2, 32, 16, dtype)
    out, cache = case.attend()
    assert_accurate(case.case, out)
    case.assert_stored(cache)
    order = torch.arange(8).flip(0)
    reverse, cache = case.attend(order)
    assert_accurate(case.case, reverse[order])
    case.assert_stored(cache)


@pytest.mark.parametrize("length", [64 * MAX_SPLITS, 64 * MAX_SPLITS + 1, 64 * MAX_SPLITS + 700])
def test_most_splits(length):
    case = Case([(1, length)], 1, 2, 16, 64, torch.float16)
    assert_accurate(case.case, case.attend()[0])


def test_a_row_has_the_same_bits_in_any_batch():
    lengths = [(1, length) for length in (1, 200, 65, 66)]
    case = Case(lengths, 1, 2, 16, 16, torch.float16)
    together, _ = case.attend()
    for index in range(len(lengths)):
        alone, _ = case.attend(torch.tensor([index]))
        assert torch.equal(alone[0], together[index])


@pytest.mark.parametrize("programs", [1, 7])
def test_programs_with_several_splits_give_the_same_bits(programs, monkeypatch):
    """Where a batch has many rows, each one has fewer programs than splits."""
    case = Case([(1, 640), (2, 130), (1, 1)], 1, 2, 16, 64, torch.float16)
    expected, cache = case.attend()
    monkeypatch.setattr(fused_attention, "_PROGRAMS", 4 * programs)
    out, same_cache = case.attend()
    assert torch.equal(out, expected)
    assert torch.equal(same_cache.nan_to_num(), cache.nan_to_num())


def test_padding_rows_share_a_slot():
    """They are at position 0 of one block and must end with finite numbers."""
    case = Case([(1, 1), (1, 20)], 1, 2, 16, 16, torch.float16)
    out, cache = case.attend(torch.tensor([1, 0, 0, 0]))
    assert torch.equal(out[1], out[2])
    assert_accurate(case.case, torch.stack([out[1], out[0]]))
    case.assert_stored(cache)


def test_a_negative_slot_is_not_stored():
    case = Case([(1, 20), (1, 33)], 1, 2, 16, 16, torch.float16)
    case.tokens[2][0] = -1
    out, cache = case.attend()
    assert_accurate(case.case, out)
    changed = (cache.nan_to_num() != case.cache.nan_to_num()).any(-1).sum()
    assert changed == 2, "the key and the value of the other row"
