"""The GLM-4-MoE and GLM-4.7-Flash families: experts after the first layers."""

from typing import Any, ClassVar

from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, GatedMLP, SelfAttention
from nanovllm.models.deepseek import DeepseekV3ForCausalLM
from nanovllm.models.expert_parts import DEEPSEEK_NAMES, deepseek_mlp
from nanovllm.models.model_config import ModelConfig


class Glm4MoeForCausalLM(DecoderForCausalLM):
    """GLM-4.5, GLM-4.5-Air, GLM-4.6 and GLM-4.7: half of each head rotates; experts after the
    first layers, chosen by sigmoids, and one that all tokens share.
    """

    names: ClassVar[dict[str, str]] = DEEPSEEK_NAMES
    only: ClassVar[dict[str, tuple[Any, ...]]] = {
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    }
    reads = frozenset({"partial_rotary_factor"})

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        attention = SelfAttention(
            config,
            self.rotary_emb(config.rope, config.head_dim),
            qk_norm=config.flag("use_qk_norm"),
            bias=config.flag("attention_bias"),
        )
        is_dense = index < config.count("first_k_dense_replace")
        return DecoderLayer(
            config, attention, GatedMLP(config) if is_dense else deepseek_mlp(config)
        )


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    """GLM-4.7-Flash: latent attention; experts chosen by sigmoids plus a bias, and one that all
    tokens share.
    """

    defaults: ClassVar[dict[str, Any]] = {"first_k_dense_replace": 1}
    ignores = frozenset({"first_k_dense_replace"})
