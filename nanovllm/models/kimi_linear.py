"""The Kimi-Linear family: Kimi Delta Attention, and latent attention without positions."""

from typing import Any, ClassVar

from nanovllm.models.decoder import DecoderLayer
from nanovllm.models.deepseek import DeepseekV3ForCausalLM
from nanovllm.models.kimi_parts import (
    KIMI_ALIASES,
    KIMI_NAMES,
    kimi_delta,
    layer_types_of_lists,
    linear_fields,
)
from nanovllm.models.mla_parts import LatentAttention
from nanovllm.models.model_config import ModelConfig


class KimiLinearForCausalLM(DeepseekV3ForCausalLM):
    """Kimi-Linear-48B-A3B: three of four layers have Kimi Delta Attention, which keeps a state; the
    fourth has latent attention without positions; experts, and one that all tokens share.
    """

    names: ClassVar[dict[str, str]] = KIMI_NAMES
    aliases: ClassVar[dict[str, str]] = KIMI_ALIASES
    defaults: ClassVar[dict[str, Any]] = {"first_k_dense_replace": 1}
    ignores = frozenset({"rope_theta", "rope_scaling", "rope_parameters", "rope_interleave"})
    reads = frozenset({"layer_types", "num_experts", "num_local_experts"})
    only: ClassVar[dict[str, tuple[Any, ...]]] = {
        "mla_use_nope": (True,),
        "moe_layer_freq": (1,),
        "moe_router_activation_func": ("sigmoid",),
    }

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        mlp = self.make_mlp(config, index)
        if layer_types_of_lists(config)[index] == "linear_attention":
            sizes = linear_fields(config)
            mixer = kimi_delta(config, sizes, low_rank=True, wide_log=True)
            return DecoderLayer(config, mixer, mlp)
        rotary_emb = self.rotary_emb(None, config.head_dim)
        bias = config.flag("attention_bias")
        return DecoderLayer(config, LatentAttention(config, rotary_emb, bias=bias), mlp)

    def published_names(self, name: str) -> tuple[str, ...]:
        published = name.replace("forget_gate.", "")
        return published, published.replace(".mlp.", ".block_sparse_moe.")
