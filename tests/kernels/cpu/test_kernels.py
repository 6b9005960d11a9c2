"""Copies and packed weights: the C kernels do what plain torch does."""

import pytest
import torch

from nanovllm.kernels.torch_kernels import TORCH
from nanovllm.platform.cpu import CPU
from tests.kernels.cpu.helpers import native, randn

DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=native)]


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_part_has_columns_of_the_pool(dtype, on):
    kernels = CPU().kernels(dtype, native=on)
    pool = torch.zeros(50, 3 * 24, dtype=dtype)
    slots = torch.tensor([49, 0, 17, 3])
    for seed, columns in enumerate(pool.chunk(3, dim=1)):
        kernels.store_rows(columns, randn(4, 24, seed=seed).to(dtype), slots)
    expected = torch.cat([randn(4, 24, seed=seed) for seed in range(3)], 1).to(dtype)
    assert torch.equal(pool[slots], expected)
    assert torch.equal(kernels.take_rows(pool, slots), expected)
    pool[slots] = 0
    assert not pool.any()


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_join_columns_of_strided_parts(dtype, on):
    kernels = CPU().kernels(dtype, native=on)
    left, right = randn(6, 30).to(dtype)[:, 5:21], randn(6, 9, seed=1).to(dtype)
    joined = kernels.join_columns((left, right))
    assert joined.is_contiguous()
    assert torch.equal(joined, torch.cat([left, right], 1))
    alone = kernels.join_columns((left,))
    assert alone.is_contiguous()
    assert torch.equal(alone, left)
    assert alone.data_ptr() != left.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_copy_in_float32(dtype):
    """Also of a draft network's logits, whose dtype is not that of the target."""
    kernels = CPU().kernels(torch.bfloat16)
    logits = randn(5, 70).to(dtype)
    for given in (logits, logits[:, 3:50]):
        copy = kernels.to_float(given)
        assert copy.data_ptr() != given.data_ptr()
        assert copy.is_contiguous()
        assert torch.equal(copy, TORCH.to_float(given))
