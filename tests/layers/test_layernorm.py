"""RMSNorm gives the same bits as transformers."""

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from nanovllm.layers.layernorm import RMSNorm


def pair(size, eps, dtype):
    """Return our norm and that of transformers, with the same random weights."""
    ours, theirs = RMSNorm(size, eps).to(dtype), Qwen3RMSNorm(size, eps).to(dtype)
    weight = torch.randn(size, generator=torch.Generator().manual_seed(size)) + 1
    ours.weight.data.copy_(weight)
    theirs.weight.data.copy_(weight)
    return ours, theirs


def normal(*shape, dtype, seed=0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 5).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("eps", [1e-6, 0.1])
@pytest.mark.parametrize("shape", [(7, 77), (5, 4, 128), (0, 16)])
def test_equals_transformers_exactly(shape, eps, dtype):
    ours, theirs = pair(shape[-1], eps, dtype)
    x = normal(*shape, dtype=dtype)
    got = ours(x)
    assert got.dtype == dtype
    assert torch.equal(got, theirs(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_norm_returns_the_normalised_sum_and_the_sum(dtype):
    ours, theirs = pair(96, 1e-6, dtype)
    x, residual = normal(9, 96, dtype=dtype), normal(9, 96, dtype=dtype, seed=1)
    kept = residual.clone()
    normalised, total = ours.add_norm(x, residual)
    assert torch.equal(total, kept + x)
    assert torch.equal(normalised, theirs(kept + x))
