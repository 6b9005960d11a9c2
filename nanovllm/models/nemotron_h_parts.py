"""Parts of Nemotron-H: the types of its layers, and MLPs and experts without a gate."""

import dataclasses

from nanovllm.errors import CheckpointError
from nanovllm.layers.experts import SharedExpertMLP
from nanovllm.models.expert_parts import deepseek_experts
from nanovllm.models.hybrid_parts import check_mixed
from nanovllm.models.mamba_parts import MambaFields
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
