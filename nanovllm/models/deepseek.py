"""The DeepSeek families V2 and V3: latent attention, and experts behind the first layers."""

from collections.abc import Collection
from typing import Any, ClassVar

from torch import nn

from nanovllm.layers.rotary_embedding import RopeConfig, RotaryEmbedding
from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, GatedMLP
from nanovllm.models.expert_parts import (
    DEEPSEEK_NAMES,
    deepseek_mlp,
    expect_stored,
    expert_groups,
)
from nanovllm.models.mla_parts import LatentAttention, expect_heads
from nanovllm.models.model_config import ModelConfig


class DeepseekV3ForCausalLM(DecoderForCausalLM):
    """DeepSeek-V3, R1 and V3.1, Kimi K2: latent attention; experts in groups, chosen by sigmoids
    plus a bias, and one that all tokens share.
    """

    names: ClassVar[dict[str, str]] = DEEPSEEK_NAMES
    aliases: ClassVar[dict[str, str]] = {"head_dim": "qk_rope_head_dim"}
    defaults: ClassVar[dict[str, Any]] = {
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "rope_interleave": True,
    }
    only: ClassVar[dict[str, tuple[Any, ...]]] = {
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
    }

    def __init__(self, config: ModelConfig, max_model_len: int) -> None:
        self._interleaved = config.flag("rope_interleave")
        super().__init__(config, max_model_len)

    def expect(self, known: Collection[str]) -> None:
        """Load experts, and the heads of kv_b_proj, together or each on its own, as a checkpoint
        has them.
        """
        expect_stored(self, known)
        expect_heads(self, known)

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        rotary_emb = self.rotary_emb(config.rope, config.head_dim)
        attention = LatentAttention(config, rotary_emb, bias=config.flag("attention_bias"))
        return DecoderLayer(config, attention, self.make_mlp(config, index))

    def make_mlp(self, config: ModelConfig, index: int) -> nn.Module:
        """Return the MLP of layer `index`, or its experts."""
        return GatedMLP(config) if self.is_dense(config, index) else self.make_experts(config)

    def is_dense(self, config: ModelConfig, index: int) -> bool:
        """Return whether layer `index` has an MLP in place of experts."""
        return index < config.count("first_k_dense_replace")

    def make_experts(self, config: ModelConfig) -> nn.Module:
        """Return the experts of a layer."""
        return deepseek_mlp(config)

    def rotary_emb(self, rope: RopeConfig | None, head_dim: int) -> RotaryEmbedding:
        found = super().rotary_emb(rope, head_dim)
        found.interleaved = self._interleaved
        return found


class DeepseekV2ForCausalLM(DeepseekV3ForCausalLM):
    """DeepSeek-V2, V2-Lite and Coder-V2: latent attention; experts, in groups if the config says
    so, chosen by a softmax, and those that all tokens share.
    """

    defaults: ClassVar[dict[str, Any]] = {
        **DeepseekV3ForCausalLM.defaults,
        "first_k_dense_replace": 0,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.0,
        "n_group": None,
        "topk_group": None,
        "topk_method": "greedy",
    }
    ignores = frozenset({"rope_interleave"})
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
