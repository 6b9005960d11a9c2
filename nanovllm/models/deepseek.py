"""The DeepSeek families V2 and V3: latent attention, and experts after the first layers."""

from collections.abc import Collection
from typing import Any, ClassVar

from torch import nn

from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, GatedMLP
from nanovllm.models.expert_parts import (
    DEEPSEEK_NAMES,
    deepseek_mlp,
    expect_stored,
    expert_groups,
    is_typed_dense,
)
from nanovllm.models.mla_parts import LatentAttention, expect_heads
from nanovllm.models.model_config import ModelConfig


class DeepseekV3ForCausalLM(DecoderForCausalLM):
    """DeepSeek-V3, R1 and V3.1, Kimi K2: latent attention; experts in groups, chosen by sigmoids
    plus a bias, and one that all tokens share.
    """

    names: ClassVar[dict[str, str]] = DEEPSEEK_NAMES
    aliases: ClassVar[dict[str, str]] = {"head_dim": "qk_rope_head_dim"}
    ignores = frozenset({"mlp_layer_types"})
    only: ClassVar[dict[str, tuple[Any, ...]]] = {
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
    }

    def expect(self, known: Collection[str]) -> None:
        """Load experts, and the heads of kv_b_proj, together or each on its own, as a checkpoint
        has them.
        """
        expect_stored(self, known)
        expect_heads(self, known)

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        bias = config.flag("attention_bias")
        attention = LatentAttention(config, self.latent_rope(config), bias=bias)
        return DecoderLayer(config, attention, self.make_mlp(config, index))

    def latent_rope(self, config: ModelConfig) -> RotaryEmbedding:
        """Return the rotary embedding of a `LatentAttention`."""
        found = self.rotary_emb(config.rope, config.head_dim)
        found.interleaved = config.flag("rope_interleave", default=True)
        return found

    def make_mlp(self, config: ModelConfig, index: int) -> nn.Module:
        """Return the MLP of layer `index`, or its experts."""
        return GatedMLP(config) if is_typed_dense(config, index) else self.make_experts(config)

    def make_experts(self, config: ModelConfig) -> nn.Module:
        """Return the experts of a layer."""
        return deepseek_mlp(config)


class DeepseekV2ForCausalLM(DeepseekV3ForCausalLM):
    """DeepSeek-V2, V2-Lite and Coder-V2: latent attention; experts, in groups if the config says
    so, chosen by a softmax, and those that all tokens share.
    """

    ignores = DeepseekV3ForCausalLM.ignores | {"rope_interleave"}
    only: ClassVar[dict[str, tuple[Any, ...]]] = {
        "scoring_func": ("softmax",),
        "topk_method": ("greedy", "group_limited_greedy"),
        "moe_layer_freq": (1,),
        "norm_topk_prob": (False,),
    }

    def make_experts(self, config: ModelConfig) -> nn.Module:
        grouped = config.fields.get("topk_method") == "group_limited_greedy"
        return deepseek_mlp(
            config,
            sigmoid=False,
            choice_bias=False,
            renormalize=False,
            groups=expert_groups(config, best=1) if grouped else None,
        )
