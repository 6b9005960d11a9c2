"""Inputs of the Triton kernels' tests: the device, the dtypes that it computes, random tensors."""

import pytest
import torch

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPES = [torch.float16, torch.float32, *([torch.bfloat16] if CUDA else [])]
"""Without bfloat16 in the interpreter, which computes it wrongly."""

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def randn(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)
