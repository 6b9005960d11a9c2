"""Gated DeltaNet against transformers' modules, of Qwen3-Next and of Qwen3.5; and Kimi Delta
Attention, of Kimi-Linear and of Ling 3.
"""

import pytest
import torch
from transformers import AutoConfig
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridDeltaAttention
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from nanovllm.errors import ConfigError
from nanovllm.layers.gated_delta import DeltaSizes, GatedDeltaNet, KimiDeltaAttention
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
    ranks = mixer_cases.on_ranks(monkeypatch, num_ranks)
    mixer_cases.assert_as_transformers(
        lambda: GatedDeltaNet(sizes, 1e-3, grouped=grouped),
        theirs,
        sizes.hidden_size,
        ranks,
        tmp_path,
    )


def test_heads_that_the_ranks_cannot_split(monkeypatch):
    for _ in mixer_cases.on_ranks(monkeypatch, 3):
        with pytest.raises(ConfigError, match="linear_num_key_heads"):
            GatedDeltaNet(SIZES[0], 1e-6)


@pytest.mark.parametrize("kimi", [False, True])
def test_small_parts_keep_their_dtype(kimi):
    """In a model in bfloat16, the state and what decides how it decays are float32."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        kimis = KimiDeltaAttention(KIMI_SIZES, 1e-6, low_rank=True)
        mixer = kimis if kimi else GatedDeltaNet(SIZES[1], 1e-6)
    finally:
        torch.set_default_dtype(torch.float32)
    kept, *heads = mixer.parts
    if kimi:
        assert kept == ((2, 3 * 4 * 6), torch.bfloat16)
        assert heads == [((6, 6), torch.float32)] * 4
        assert mixer.f.a.weight.dtype == torch.bfloat16
    else:
        assert kept == ((3, 2 * 2 * 6 + 4 * 10), torch.bfloat16)
        assert heads == [*[((6, 10), torch.float32)] * 4, ((4,), torch.float32)]
        assert mixer.conv1d.weight.dtype == torch.bfloat16
    assert mixer.A_log.dtype == mixer.dt_bias.dtype == torch.float32


KIMI_SIZES = DeltaSizes(40, 4, 4, 6, 6, 3)
KIMI = {
    "Kimi-Linear": {"low_rank": True, "wide_log": True},
    "Ling 3": {"low_rank": False, "bound": -4.0},
    "without a bound": {"low_rank": False},
}


def make_kimi(low_rank, bound=None, wide_log=False):
    """Return transformers' module, with the names and the tensors of published checkpoints."""
    sizes = {"hidden_size": KIMI_SIZES.hidden_size, "num_hidden_layers": 4, "rms_norm_eps": 1e-3}
    heads, size, taps = KIMI_SIZES.value_heads, KIMI_SIZES.value_dim, KIMI_SIZES.taps
    if low_rank:
        linear = {"num_heads": heads, "head_dim": size, "short_conv_kernel_size": taps}
        config = AutoConfig.for_model("kimi_linear", **sizes, linear_attn_config=linear)
        module = KimiLinearDeltaAttention(config, 0)
    else:
        sizes |= {"num_attention_heads": heads, "head_dim": size, "short_conv_kernel_size": taps}
        gate = {"kda_safe_gate": bound is not None, "kda_lower_bound": bound or -5.0}
        module = BailingHybridDeltaAttention(
            AutoConfig.for_model("bailing_hybrid", **sizes, **gate), 0
        )
    return mixer_cases.randomize(module)


class Published:
    """Has the tensors of transformers' module under the names that published checkpoints have.

    Those whose names a family replaces have ours.
    """

    def __init__(self, module):
        self._module = module

    def state_dict(self):
        found = {}
        for name, value in self._module.state_dict().items():
            name = name.replace("forget_gate.", "").replace("o_norm", "norm")
            name = name.replace("o_proj", "out_proj")
            low_rank = name.endswith(("_a_proj.weight", "_b_proj.weight"))
            found[f"{name[0]}.{name}" if low_rank else name] = value
        kernels = found.pop("conv1d.weight").chunk(3)
        return found | {
            f"{part}_conv1d.weight": each for part, each in zip("qkv", kernels, strict=True)
        }


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("kind", KIMI)
def test_kimi_delta_attention_as_transformers(kind, num_ranks, tmp_path, monkeypatch):
    theirs = make_kimi(**KIMI[kind])
    ranks = mixer_cases.on_ranks(monkeypatch, num_ranks)
    mixer_cases.assert_as_transformers(
        lambda: KimiDeltaAttention(KIMI_SIZES, 1e-3, **KIMI[kind]),
        theirs,
        KIMI_SIZES.hidden_size,
        ranks,
        tmp_path,
        Published(theirs),
    )
