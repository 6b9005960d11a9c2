"""The table of rotary angles, and rotated queries and keys, with each scaling of transformers."""

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from nanovllm.kernels.torch_math import rotate
from nanovllm.layers.rotary_embedding import RopeConfig, RotaryEmbedding, inverse_frequencies
from tests.closeness import assert_close

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
VARIANTS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "yarn": YARN,
    "yarn factor 1": {**YARN, "factor": 1.0},
    "yarn short original": {**YARN, "original_max_position_embeddings": 512},
    "yarn beta_fast": {**YARN, "beta_fast": 64},
    "yarn beta_slow": {**YARN, "beta_slow": 2.5},
    "yarn equal betas": {**YARN, "beta_fast": 8, "beta_slow": 8, "truncate": False},
    "yarn attention_factor": {**YARN, "attention_factor": 1.3},
    "yarn mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
    "yarn mscale alone": {**YARN, "mscale": 0.7},
    "yarn attention_factor before mscale": {
        **YARN,
        "attention_factor": 0.9,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
    },
    "yarn not truncated": {**YARN, "truncate": False},
    "llama3": LLAMA3,
    "llama3 low and high factors": {**LLAMA3, "low_freq_factor": 0.5, "high_freq_factor": 9.0},
    "llama3 short original": {**LLAMA3, "original_max_position_embeddings": 512},
}


def both(variant, head_dim, theta):
    """Return transformers' rotary embedding and our settings for the same variant."""
    settings = VARIANTS[variant]
    theirs = Qwen3RotaryEmbedding(
        Qwen3Config(
            hidden_size=4 * head_dim,
            num_attention_heads=4,
            head_dim=head_dim,
            max_position_embeddings=131072,
            rope_parameters={"rope_theta": theta, **settings},
        )
    )
    ours = dict(settings)
    ours["original_max_position"] = ours.pop("original_max_position_embeddings", 131072)
    return theirs, RopeConfig(theta, **ours)


@pytest.mark.parametrize(("head_dim", "theta"), [(6, 10_000.0), (80, 5e7), (128, 1e6)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_inverse_frequencies(variant, head_dim, theta):
    theirs, rope = both(variant, head_dim, theta)
    inv_freq, scale = rope.inverse_frequencies(head_dim)
    assert inv_freq.dtype == torch.float32
    assert_close(inv_freq, theirs.inv_freq, rtol=1e-6, atol=0)
    assert scale == pytest.approx(theirs.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("variant", ["default", "linear", "yarn", "yarn attention_factor"])
def test_rotation(variant):
    theirs, rope = both(variant, 80, 1_000_000.0)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(50, 6, 80, generator=generator)
    k = torch.randn(50, 3, 80, generator=generator)
    positions = torch.randint(5000, (50,), generator=generator)
    cos, sin = theirs(q, positions[None])
    expected = apply_rotary_pos_emb(q[None], k[None], cos, sin, unsqueeze_dim=2)
    cos_sin = RotaryEmbedding(5000, *rope.inverse_frequencies(80)).cos_sin[positions]
    for x, wanted in zip((q, k), expected, strict=True):
        got = rotate(x, cos_sin)
        assert_close(got, wanted[0], rtol=0, atol=2e-5)


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


def test_angles_are_not_in_the_checkpoint():
    embedding = RotaryEmbedding(8, inverse_frequencies(16, 10_000.0))
    assert not embedding.state_dict()
    assert not list(embedding.parameters())
