"""What the tests of the C kernels share. Holds no fixture: conftest.py does."""

import pytest
import torch

from nanovllm.kernels.cpu.library import library

native = pytest.mark.skipif(library() is None, reason="no compiler here")


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return the same normal bfloat16 numbers for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
