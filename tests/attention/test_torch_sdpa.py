"""The torch backend, and that of `nanovllm lab new`, against a float64 reference that computes one
token at a time.
"""

import dataclasses
import random

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from nanovllm.apps.lab.templates.backend import MyBackend
from nanovllm.attention import torch_sdpa
from nanovllm.attention.selector import select_backend, user_backend
from nanovllm.attention.spec import AttentionSpec, QKNormRope
from nanovllm.attention.torch_sdpa import TorchBackend, TorchExplicitBackend
from nanovllm.errors import ConfigError, UnsupportedModelError
from nanovllm.kernels.torch_kernels import TORCH
from nanovllm.platform.cpu import CPU
from tests.attention.cases import contiguous_sdpa, make_case, random_rows, reference
from tests.closeness import assert_close


def run(case, make=TorchBackend):
    backend = make(case.spec)
    batch = dataclasses.replace(case.batch, metadata=backend.plan(case.batch))
    size, positions = case.spec.head_dim // 2, int(batch.positions.max()) + 1
    unrotated = torch.cat([torch.ones(positions, size), torch.zeros(positions, size)], 1)
    qkv = torch.cat([case.q, case.k, case.v], 1).flatten(1)
    return backend.forward(qkv, QKNormRope(None, None, 0.0, unrotated), case.cache, batch)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
def test_mixed_batches(head_dim, block_size, seed):
    chooser = random.Random(f"{head_dim} {block_size} {seed}")
    num_kv_heads, group = chooser.choice([1, 2, 3]), chooser.randint(1, 8)
    rows = random_rows(chooser.random(), block_size)
    case = make_case(rows, num_kv_heads, group, head_dim, block_size, seed=seed)
    assert_close(run(case), reference(case), atol=1e-5, rows=case.token_names())


@pytest.mark.parametrize("group", range(1, 9))
def test_group_sizes(group):
    case = make_case([(5, 5), (1, 30), (4, 19), (1, 1)], 2, group, 64, 16, seed=group)
    assert_close(run(case), reference(case), atol=1e-5, rows=case.token_names())


@pytest.mark.parametrize("rows", [[(1, 1), (7, 7), (1, 5), (40, 40)], [(3, 20), (16, 16)]])
def test_tokens_see_those_after_them(rows):
    case = make_case(rows, 2, 3, 16, 16)
    case.spec = dataclasses.replace(case.spec, causal=False)
    found = run(case).split(case.batch.lengths.query_lens)
    queries = case.q.split(case.batch.lengths.query_lens)
    for q, keys, values, out in zip(queries, case.keys, case.values, found, strict=True):
        exact = scaled_dot_product_attention(
            *(x.double().transpose(0, 1) for x in (q, keys, values)), enable_gqa=True
        )
        assert_close(out, exact.transpose(0, 1), atol=1e-5)


@pytest.mark.parametrize("window", [None, 4])
def test_tokens_of_a_picture_see_each_other(window):
    case = make_case([(20, 20), (1, 5), (7, 30)], 2, 3, 16, 16)
    case.spec = dataclasses.replace(case.spec, sees_pictures=True, window=window)
    ends = case.batch.positions.int() + 1
    ends[3:9], ends[21:25] = 9, 27  # of the third row, the last four of a picture
    case.batch = dataclasses.replace(case.batch, ends=ends)
    found = run(case, TorchBackend if window is None else TorchExplicitBackend)
    assert_close(found, reference(case), atol=1e-5, rows=case.token_names())
    causal = dataclasses.replace(case, batch=dataclasses.replace(case.batch, ends=None))
    assert (found - reference(causal))[3:8].abs().amax((1, 2)).min() > 0.01


def test_a_backend_that_has_not_heard_of_them_refuses_such_layers():
    spec = AttentionSpec(4, 2, 8, torch.float32, torch.device("cpu"), None, causal=False)
    assert isinstance(select_backend(spec, CPU().attention_backends(TORCH)), TorchBackend)
    assert MyBackend.unsupported(spec) is None
    with pytest.raises(ConfigError, match="only supports causal attention"):
        user_backend(spec, "nanovllm.apps.lab.templates.backend:MyBackend")
    windowed = dataclasses.replace(spec, window=5)
    with pytest.raises(UnsupportedModelError, match="only supports causal attention"):
        select_backend(windowed, CPU().attention_backends(TORCH))


@pytest.mark.parametrize("backend", [TorchBackend, MyBackend])
@pytest.mark.parametrize(
    "rows",
    [
        [(1, 1)],
        [(16, 32)],
        [(2, 17), (2, 18)],
        [(1, n) for n in range(1, 40)],
        [(n, n) for n in range(1, 20)],
        [(n, 40) for n in range(1, 41, 5)],
    ],
    ids=str,
)
def test_block_edges_and_lone_kinds_of_row(rows, backend):
    case = make_case(rows, 2, 3, 16, 16)
    assert_close(run(case, backend), reference(case), atol=1e-5, rows=case.token_names())


@pytest.mark.parametrize("limit", [1, 40, 200])
def test_single_tokens_split_over_several_calls(monkeypatch, limit):
    """The limit on gathered tokens splits calls and never a row, also if one row exceeds it."""
    monkeypatch.setattr(torch_sdpa, "_MAX_GATHERED_TOKENS", limit)
    rows = [(1, length) for length in (30, 7, 90, 31, 8, 29, 1, 88)]
    case = make_case(rows, 2, 2, 16, 4)
    assert len(TorchBackend(case.spec).plan(case.batch)) >= 3
    assert_close(run(case), reference(case), atol=1e-5, rows=case.token_names())


def test_single_tokens_of_like_length_share_a_call():
    case = make_case([(1, 100 + n) for n in range(20)], 1, 2, 16, 16)
    assert len(TorchBackend(case.spec).plan(case.batch)) == 1


@pytest.mark.parametrize("seed", range(2))
def test_bfloat16_is_no_worse_than_twice_torchs_own_error(seed):
    chooser = random.Random(seed)
    block_size, head_dim = chooser.choice([3, 16, 256]), chooser.choice([64, 80, 128])
    rows = [*random_rows(seed, block_size), (1, 250), (30, 200), (20, 20)]
    case = make_case(rows, 2, 4, head_dim, block_size, torch.bfloat16, seed)
    exact = reference(case)
    out = run(case)
    assert out.dtype == torch.bfloat16
    ours, torchs = (out - exact).abs(), (contiguous_sdpa(case) - exact).abs()
    assert ours.max() <= 2 * torchs.max()
    assert ours.mean() <= 2 * torchs.mean()


def test_a_row_does_not_read_its_neighbours():
    """Changing one row's cached keys and values changes no other row's output."""
    rows = [(1, 20), (6, 22), (1, 21), (9, 9)]
    case = make_case(rows, 2, 2, 16, 4)
    before = run(case)
    blocks = case.batch.block_tables[0, :5].long()
    case.cache[:, blocks] += 3.0
    after = run(case)
    assert not torch.equal(before[0], after[0])
    assert torch.equal(before[1:], after[1:])


def test_keys_and_values_land_in_their_slots_and_nowhere_else():
    case = make_case([(3, 10), (1, 5), (7, 7)], 2, 2, 16, 4)
    expected = case.cache.clone()
    for token, slot in enumerate(case.batch.slot_mapping.tolist()):
        expected[0, slot // 4, slot % 4] = case.k[token]
        expected[1, slot // 4, slot % 4] = case.v[token]
    run(case)
    assert torch.equal(case.cache, expected)


@pytest.mark.parametrize(("asked", "given"), [(None, 16), (1, 1), (48, 48)])
def test_the_backend_chooses_the_block_size_where_it_may(asked, given):
    spec = AttentionSpec(4, 2, 8, torch.float32, torch.device("cpu"), asked)
    backend = select_backend(spec, CPU().attention_backends(TORCH))
    assert backend.block_size == given
    assert backend.kv_cache_shape(5) == (2, 5, given, 2, 8)
