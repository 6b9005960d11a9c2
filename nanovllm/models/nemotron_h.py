"""The Nemotron-H family: each layer is a Mamba-2 mixer, attention, an MLP, or experts."""

from typing import Any, ClassVar

from nanovllm.kernels.torch_math import NORM_WIDE
from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, SelfAttention
from nanovllm.models.hybrid_parts import BlockLayer
from nanovllm.models.mamba_parts import mamba_mixer
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.nemotron_h_parts import (
    MAMBA_FIELDS,
    MIXER_NAMES,
    block_types,
    plain_experts,
    plain_mlp,
)


class NemotronHForCausalLM(DecoderForCausalLM):
    """Nemotron-H, Nemotron Nano 2, Nemotron 3 and 3.5 Nano: each layer is one of four: Mamba-2,
    which keeps a state; attention without RoPE; an MLP without a gate; experts without gates.
    """

    names: ClassVar[dict[str, str]] = MIXER_NAMES
    aliases: ClassVar[dict[str, str]] = {
        "rms_norm_eps": "layer_norm_epsilon",
        "layer_types": "layers_block_type",
        "n_groups": "mamba_n_groups",
        "conv_kernel": "mamba_d_conv",
        "use_conv_bias": "mamba_conv_bias",
    }
    only: ClassVar[dict[str, tuple[Any, ...]]] = {
        "mamba_hidden_act": ("silu",),
        "n_shared_experts": (1,),
        "residual_in_fp32": (False,),
        "moe_latent_size": (None,),
    }
    reads = frozenset({"layer_types"})
    left_out = ("mtp.",)
    norm: ClassVar[dict[str, Any]] = {"kind": NORM_WIDE}

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        kind = block_types(config)[index]
        if kind == "linear_attention":
            mixer = mamba_mixer(config, None, MAMBA_FIELDS)
            return BlockLayer(config, mixer, None, **self.norm)
        if kind == "full_attention":
            attention = SelfAttention(config, self.rotary_emb(None, config.head_dim))
            return BlockLayer(config, attention, None, **self.norm)
        dense = kind == "mlp"
        mlp = plain_mlp(config, config.intermediate_size) if dense else plain_experts(config)
        return BlockLayer(config, None, mlp, **self.norm)

    def published_names(self, name: str) -> tuple[str, ...]:
        return (name.replace("backbone.", "model.", 1),)
