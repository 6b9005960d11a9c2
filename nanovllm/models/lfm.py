"""The LFM2 and LFM3 families: short convolutions, and attention in the other layers."""

import dataclasses
from typing import ClassVar

from torch import nn

from nanovllm.attention.spec import AttentionOptions
from nanovllm.errors import CheckpointError
from nanovllm.models.config_fields import MAX_SIZE
from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, GatedMLP, SelfAttention
from nanovllm.models.expert_parts import NUMBERED, sparse_mlp
from nanovllm.models.hybrid_parts import check_mixed, short_conv
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.parts import (
    OTHER_MODALITIES,
    NarrowGateAttention,
    SandwichLayer,
    attention_biases,
)
from nanovllm.options.validation import check_int

LFM_NAMES = {
    **{f"self_attn.{part}.": f"conv.{part}." for part in ("in_proj", "conv", "out_proj")},
    "input_layernorm.": "operator_norm.",
    "post_attention_layernorm.": "ffn_norm.",
    "model.norm.": "model.embedding_norm.",
    "mlp.gate_proj.": "feed_forward.w1.",
    "mlp.up_proj.": "feed_forward.w3.",
    "mlp.down_proj.": "feed_forward.w2.",
    "mlp.": "feed_forward.",
    "after_attention_norm.": "post_operator_norm.",
    "after_mlp_norm.": "post_ffn_norm.",
}
"""Checkpoint names of LFM2 and LFM3. Only LFM3 has the last two."""


class Lfm2ForCausalLM(DecoderForCausalLM):
    """LFM2 and LFM2.5 350M to 2.6B: most layers are short convolutions, which keep a state; the
    others have attention with norms of queries and keys.
    """

    names: ClassVar[dict[str, str]] = {
        **LFM_NAMES,
        "self_attn.o_proj.": "self_attn.out_proj.",
        "self_attn.q_norm.": "self_attn.q_layernorm.",
        "self_attn.k_norm.": "self_attn.k_layernorm.",
    }
    aliases: ClassVar[dict[str, str]] = {
        "rms_norm_eps": "norm_eps",
        "intermediate_size": "block_ff_dim",
        "tie_word_embeddings": "tie_embedding",
    }
    reads = frozenset({"layer_types"})

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        mlp = self.make_mlp(config, index)
        if _layer_types(config)[index] == "conv":
            return DecoderLayer(config, short_conv(config), mlp)
        rotary_emb = self.rotary_emb(config.rope, config.head_dim)
        return DecoderLayer(config, SelfAttention(config, rotary_emb, qk_norm=True), mlp)

    def make_mlp(self, config: ModelConfig, index: int) -> nn.Module:
        """Return the MLP of layer `index`, or its experts."""
        return GatedMLP(dataclasses.replace(config, intermediate_size=_adjusted_size(config)))


class Lfm2MoeForCausalLM(Lfm2ForCausalLM):
    """LFM2-8B-A1B: LFM2 with experts in place of the MLP after the first layers."""

    aliases: ClassVar[dict[str, str]] = {
        "rms_norm_eps": "norm_eps",
        "tie_word_embeddings": "tie_embedding",
    }
    reads = frozenset({"layer_types", "num_experts"})

    def make_mlp(self, config: ModelConfig, index: int) -> nn.Module:
        if index < config.count("num_dense_layers"):
            return GatedMLP(config)
        return sparse_mlp(
            config,
            config.size("moe_intermediate_size"),
            stored=NUMBERED,
            renormalize=config.flag("norm_topk_prob"),
            factor=config.number("routed_scaling_factor", 1.0),
            sigmoid=True,
            epsilon=1e-6,
            choice_bias=config.flag("use_expert_bias"),
        )


def _layer_types(config: ModelConfig) -> list[str]:
    """Return each layer's type: "conv" or "full_attention"."""
    given = [config.fields.get(key) is not None for key in ("layer_types", "full_attn_idxs")]
    if given != [False, True]:
        return check_mixed(config.layer_types(0, "conv"))
    attends = config.numbers("full_attn_idxs")
    names = ("conv", "full_attention")
    return check_mixed([names[index in attends] for index in range(config.num_layers)])


def _adjusted_size(config: ModelConfig) -> int:
    """Return the size of the MLP: two thirds of the config's, times a factor, rounded up."""
    size = config.intermediate_size
    multiple = config.size("block_multiple_of")
    if not config.flag("block_auto_adjust_ff_dim"):
        return size
    size = int(config.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    size = -(-size // multiple) * multiple
    return check_int(CheckpointError, "config.json: the adjusted block_ff_dim", size, 1, MAX_SIZE)


class Lfm3ForCausalLM(DecoderForCausalLM):
    """LFM3 1.7B: norms on both sides; half of the layers are short convolutions, which keep a
    state; the others have attention with a gate for each head, and half of those a window.
    """

    names: ClassVar[dict[str, str]] = LFM_NAMES
    published: ClassVar[dict[str, str]] = {"self_attn.gate_proj.": "self_attn.g_proj."}
    aliases: ClassVar[dict[str, str]] = {"rms_norm_eps": "norm_eps"}
    ignores = frozenset({"partial_rotary_factor"})  # but not in rope_parameters
    reads = frozenset({"layer_types", "rope_parameters", "partial_rotary_factor"})

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        default = ["conv", *_KINDS * config.num_layers][: config.num_layers]
        kind = check_mixed(config.layer_types_of(_KINDS, default))[index]
        mixer = short_conv(config) if kind == "conv" else self.make_attention(config, kind)
        sandwich = config.flag("use_sandwich_norm", default=True)
        return (SandwichLayer if sandwich else DecoderLayer)(config, mixer, GatedMLP(config))

    def make_attention(self, config: ModelConfig, kind: str) -> SelfAttention:
        """Return the attention of a layer of type `kind`."""
        gated = config.flag("use_attention_gate", default=True)
        window = config.size("sliding_window") if kind == "sliding_attention" else None
        return (NarrowGateAttention if gated else SelfAttention)(
            config,
            self.rotary_emb(config.rope_of(kind), config.head_dim),
            qk_norm=True,
            options=AttentionOptions(window=window),
            **attention_biases(config),
        )


_KINDS = ("conv", "full_attention", "conv", "sliding_attention")
"""The types of four layers after the first, which is a convolution, too."""


class Lfm3VlForConditionalGeneration(Lfm3ForCausalLM):
    """LFM3-VL 2B, with pictures."""

    left_out = OTHER_MODALITIES


class Lfm2VlForConditionalGeneration(Lfm2ForCausalLM):
    """LFM2-VL and LFM2.5-VL, with pictures."""

    left_out = OTHER_MODALITIES
