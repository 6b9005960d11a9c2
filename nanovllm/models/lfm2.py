"""The LFM2 family: most layers are short convolutions, the others have attention."""

import dataclasses
from typing import ClassVar

from torch import nn

from nanovllm.errors import CheckpointError
from nanovllm.models.config_fields import MAX_SIZE
from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, GatedMLP, SelfAttention
from nanovllm.models.expert_parts import NUMBERED, sparse_mlp
from nanovllm.models.hybrid_parts import check_mixed, short_conv
from nanovllm.models.model_config import ModelConfig
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
