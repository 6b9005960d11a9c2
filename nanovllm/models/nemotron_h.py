"""The Nemotron-H family: each layer is a Mamba-2 mixer, attention, an MLP, or experts."""

import dataclasses
from typing import Any, ClassVar

from nanovllm.errors import CheckpointError
from nanovllm.kernels.torch_math import NORM_WIDE
from nanovllm.layers.experts import SharedExpertMLP
from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, SelfAttention
from nanovllm.models.expert_parts import deepseek_experts
from nanovllm.models.hybrid_parts import BlockLayer, MambaFields, check_mixed, mamba_mixer
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.parts import PlainMLP, named_activation
from nanovllm.options.validation import shown

MIXER_NAMES = {
    "model.embed_tokens.": "backbone.embeddings.",
    "model.norm.": "backbone.norm_f.",
    "model.": "backbone.",
    "mlp.expert_bias": "mixer.gate.e_score_correction_bias",
    "mlp.shared_expert.": "mixer.shared_experts.",
    **dict.fromkeys(("mlp.", "self_attn."), "mixer."),
    "input_layernorm.": "norm.",
}
"""Checkpoint names for the modules of a decoder of `BlockLayer`s."""
MAMBA_FIELDS = MambaFields(
    "mamba_num_heads",
    "mamba_head_dim",
    "n_groups",
    "ssm_state_size",
    "conv_kernel",
    "use_conv_bias",
    "use_bias",
)
_KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""The types of layers, by their letters in hybrid_override_pattern."""


def block_types(config: ModelConfig) -> list[str]:
    """Return the type of each layer: "linear_attention", "full_attention", "mlp" or "moe"."""
    if config.fields["layer_types"] is not None:
        return check_mixed(config.layer_types_of(_KINDS.values(), []), "layers_block_type")
    key = "hybrid_override_pattern"
    letters = config.fields.get(key)
    if not isinstance(letters, str) or set(letters) - {*_KINDS}:
        raise CheckpointError(
            f"config.json: without layers_block_type, {key} must have a letter of "
            f"{''.join(_KINDS)} for each layer, is {shown(letters)}"
        )
    if len(letters) != config.num_layers:
        raise CheckpointError(
            f"config.json: {key} has {len(letters)} letters for {config.num_layers} layers"
        )
    return check_mixed([_KINDS[letter] for letter in letters], key)


def plain_mlp(config: ModelConfig, size: int) -> PlainMLP:
    """Return an MLP of intermediate size `size` without a gate."""
    activation = named_activation(config, "mlp_hidden_act", "relu2")
    sized = dataclasses.replace(config, intermediate_size=size)
    return PlainMLP(sized, activation, config.flag("mlp_bias"))


def plain_experts(config: ModelConfig) -> SharedExpertMLP:
    """Return experts without gates, and one that all tokens share."""
    config.only("mlp_hidden_act", "relu2")
    sparse = deepseek_experts(config, gated=False, activation="relu2")
    shared = plain_mlp(config, config.size("moe_shared_expert_intermediate_size"))
    return SharedExpertMLP(sparse.gate, sparse.experts, shared)


class NemotronHForCausalLM(DecoderForCausalLM):
    """Nemotron-H, Nemotron Nano 2, Nemotron 3 and 3.5 Nano: each layer is one of four: Mamba-2,
    which keeps a state; attention without RoPE; an MLP without a gate; experts without gates.
    """

    names: ClassVar[dict[str, str]] = MIXER_NAMES
    published: ClassVar[dict[str, str]] = {"backbone.": "model."}
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
