"""Kimi Delta Attention against transformers' modules, of Kimi-Linear and of Ling 3."""

import pytest
import torch
from transformers import AutoConfig
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridDeltaAttention
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

from nanovllm.layers.gated_delta import DeltaSizes, KimiDeltaAttention
from tests.layers import mixer_cases

SIZES = DeltaSizes(40, 4, 4, 6, 6, 3)
MODULE = "nanovllm.layers.gated_delta"
KINDS = {
    "Kimi-Linear": {"low_rank": True, "wide_log": True},
    "Ling 3": {"low_rank": False, "bound": -4.0},
    "without a bound": {"low_rank": False},
}


def make_theirs(low_rank, bound=None, wide_log=False):
    """Return transformers' module, with the names and the tensors of published checkpoints."""
    sizes = {"hidden_size": SIZES.hidden_size, "num_hidden_layers": 4, "rms_norm_eps": 1e-3}
    heads, size, taps = SIZES.value_heads, SIZES.value_dim, SIZES.taps
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
@pytest.mark.parametrize("kind", KINDS)
def test_as_transformers(kind, num_ranks, tmp_path, monkeypatch):
    theirs = make_theirs(**KINDS[kind])
    ranks = mixer_cases.on_ranks(monkeypatch, MODULE, num_ranks)
    mixer_cases.assert_as_transformers(
        lambda: KimiDeltaAttention(SIZES, 1e-3, **KINDS[kind]),
        theirs,
        SIZES.hidden_size,
        ranks,
        tmp_path,
        Published(theirs),
    )


def test_small_parts_keep_their_dtype():
    """In a model in bfloat16, the state and what decides how it decays are float32."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        mixer = KimiDeltaAttention(SIZES, 1e-6, low_rank=True)
    finally:
        torch.set_default_dtype(torch.float32)
    kept, *heads = mixer.parts
    assert kept == ((2, 3 * 4 * 6), torch.bfloat16)
    assert heads == [((6, 6), torch.float32)] * 4
    assert mixer.A_log.dtype == mixer.dt_bias.dtype == torch.float32
    assert mixer.f.a.weight.dtype == torch.bfloat16
