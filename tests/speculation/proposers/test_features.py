"""The feature pool and joined rows: the C kernels copy what torch would."""

import pytest
import torch

from nanovllm.kernels.cpu import ops as cpu_ops
from nanovllm.speculation.proposers.features import FeatureStore, join_columns, take_rows
from tests.kernels.cpu.helpers import native, randn

DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=native)]


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_layer_has_columns_of_the_pool(dtype, on):
    pool = torch.zeros(50, 3 * 24, dtype=dtype)
    stores = [FeatureStore(columns, native=on) for columns in pool.chunk(3, dim=1)]
    slots = torch.tensor([49, 0, 17, 3])
    for seed, store in enumerate(stores):
        store.store(randn(4, 24, seed=seed).to(dtype), slots)
    expected = torch.cat([randn(4, 24, seed=seed) for seed in range(3)], 1).to(dtype)
    assert torch.equal(pool[slots], expected)
    assert torch.equal(take_rows(pool, slots, native=on), expected)
    pool[slots] = 0
    assert not pool.any()


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_join_columns_of_strided_parts(dtype, on):
    left, right = randn(6, 30).to(dtype)[:, 5:21], randn(6, 9, seed=1).to(dtype)
    joined = join_columns((left, right), native=on)
    assert joined.is_contiguous()
    assert torch.equal(joined, torch.cat([left, right], 1))
    alone = join_columns((left,), native=on)
    assert alone.is_contiguous()
    assert torch.equal(alone, left)
    assert alone.data_ptr() != left.data_ptr()


@native
def test_kernels_are_used_only_if_wanted(monkeypatch):
    calls = []
    monkeypatch.setattr(cpu_ops, "copy_rows", lambda *args, **rows: calls.append(args))
    pool, hidden, slots = randn(8, 4), randn(2, 4), torch.tensor([0, 1])
    FeatureStore(pool, native=False).store(hidden, slots)
    join_columns((hidden, hidden), native=False)
    take_rows(pool, slots, native=False)
    assert not calls
    FeatureStore(pool, native=True).store(hidden, slots)
    join_columns((hidden, hidden), native=True)
    take_rows(pool, slots, native=True)
    assert len(calls) == 4
