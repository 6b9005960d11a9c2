"""Gated DeltaNet against transformers' modules, of Qwen3-Next and of Qwen3.5."""

import pytest
import torch
from transformers import AutoConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from nanovllm.errors import ConfigError
from nanovllm.layers.gated_delta import DeltaSizes, GatedDeltaNet
from tests.layers import mixer_cases

SIZES = [
    DeltaSizes(40, 2, 2, 8, 8, 4),
    DeltaSizes(24, 2, 4, 6, 10, 4),
    DeltaSizes(24, 4, 16, 8, 4, 3),
]


def make_theirs(sizes, grouped):
    config = AutoConfig.for_model(
        "qwen3_next" if grouped else "qwen3_5_text",
        hidden_size=sizes.hidden_size,
        linear_num_key_heads=sizes.key_heads,
        linear_num_value_heads=sizes.value_heads,
        linear_key_head_dim=sizes.key_dim,
        linear_value_head_dim=sizes.value_dim,
        linear_conv_kernel_dim=sizes.taps,
        num_hidden_layers=4,
        rms_norm_eps=1e-3,
    )
    module = Qwen3NextGatedDeltaNet if grouped else Qwen3_5GatedDeltaNet
    return mixer_cases.randomize(module(config, 0))


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=["1 to 1", "1 to 2", "1 to 4"])
def test_as_transformers(sizes, grouped, num_ranks, tmp_path, monkeypatch):
    theirs = make_theirs(sizes, grouped)
    ranks = mixer_cases.on_ranks(monkeypatch, "nanovllm.layers.gated_delta", num_ranks)
    mixer_cases.assert_as_transformers(
        lambda: GatedDeltaNet(sizes, 1e-3, grouped=grouped),
        theirs,
        sizes.hidden_size,
        ranks,
        tmp_path,
    )


def test_heads_that_the_ranks_cannot_split(monkeypatch):
    for _ in mixer_cases.on_ranks(monkeypatch, "nanovllm.layers.gated_delta", 3):
        with pytest.raises(ConfigError, match="linear_num_key_heads"):
            GatedDeltaNet(SIZES[0], 1e-6)


def test_small_parts_keep_their_dtype():
    """In a model in bfloat16, the state and what decides how it decays are float32."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        mixer = GatedDeltaNet(SIZES[1], 1e-6)
    finally:
        torch.set_default_dtype(torch.float32)
    kept, *heads, scales = mixer.parts
    assert kept == ((3, 2 * 2 * 6 + 4 * 10), torch.bfloat16)
    assert heads == [((6, 10), torch.float32)] * 4
    assert scales == ((4,), torch.float32)
    assert mixer.A_log.dtype == mixer.dt_bias.dtype == torch.float32
    assert mixer.conv1d.weight.dtype == torch.bfloat16
