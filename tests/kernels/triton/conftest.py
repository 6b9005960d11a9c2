"""Fixtures of the Triton kernels' tests."""

import pytest
import torch


@pytest.fixture
def inference_mode():
    """Run the test without autograd, as the engine runs kernels."""
    with torch.inference_mode():
        yield
