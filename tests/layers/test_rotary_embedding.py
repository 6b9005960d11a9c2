"""The table of rotary angles; with each scaling in test_rope_scaling.py."""

import torch

from nanovllm.kernels.torch_math import rotate
from nanovllm.layers.rope_scaling import inverse_frequencies
from nanovllm.layers.rotary_embedding import RotaryEmbedding


def test_angles_keep_float32_where_the_models_dtype_is_narrower():
    """In bfloat16 the angle of position 4001 would be that of position 4000."""
    inv_freq = inverse_frequencies(64, 10_000.0)
    exact = RotaryEmbedding(5000, inv_freq).cos_sin
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        narrow = RotaryEmbedding(5000, inv_freq)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(narrow.cos_sin, exact)
    x = torch.randn(2, 1, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    cos_sin = narrow.cos_sin[[4000, 4001]]
    rotated = rotate(x, cos_sin)
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, rotate(x.float(), cos_sin).bfloat16())


def test_position_zero_does_not_rotate():
    x = torch.randn(1, 2, 16, generator=torch.Generator().manual_seed(0))
    cos_sin = RotaryEmbedding(8, inverse_frequencies(16, 10_000.0)).cos_sin
    assert torch.equal(rotate(x, cos_sin[:1]), x)


def test_angles_are_not_in_the_checkpoint():
    embedding = RotaryEmbedding(8, inverse_frequencies(16, 10_000.0))
    assert not embedding.state_dict()
    assert not list(embedding.parameters())
