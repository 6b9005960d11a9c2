"""The AFMoE family: norms on both sides, gated attention, windows, and experts."""

from typing import Any, ClassVar

from nanovllm.attention.spec import AttentionOptions
from nanovllm.kernels.torch_math import NORM_WIDE
from nanovllm.models.decoder import Decoder, DecoderForCausalLM, DecoderLayer, GatedMLP
from nanovllm.models.expert_parts import BY_SIGMOID, sparse_mlp, with_shared
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.parts import GatedAttention, SandwichLayer, ScaledDecoder, attention_biases


class AfmoeForCausalLM(DecoderForCausalLM):
    """Trinity Nano and Mini: norms on both sides, gated attention; three of four layers have a
    window, the fourth has no RoPE; experts after the first layers, and one for all tokens.
    """

    names: ClassVar[dict[str, str]] = {
        "after_attention_norm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_mlp_layernorm",
        "after_mlp_norm": "post_mlp_layernorm",
        "mlp.gate.": "mlp.router.gate.",
        "mlp.shared_expert.": "mlp.shared_experts.",
    }
    norm: ClassVar[dict[str, Any]] = {"kind": NORM_WIDE}
    only: ClassVar[dict[str, tuple[Any, ...]]] = {
        "score_func": ("sigmoid",),
        "route_norm": (True,),
        "n_group": (1,),
        "num_expert_groups": (1,),
        "num_limited_groups": (1,),
    }
    reads = frozenset({"layer_types", "num_experts"})

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        interval = config.size("global_attn_every_n_layers", 4)
        slides = config.layer_types(interval)[index] == "sliding_attention"
        attention = GatedAttention(
            config,
            self.rotary_emb(config.rope if slides else None, config.head_dim),
            qk_norm=True,
            norm_kind=NORM_WIDE,
            options=AttentionOptions(window=config.windows(interval)[index]),
            **attention_biases(config),
        )
        if index < config.count("num_dense_layers"):
            return SandwichLayer(config, attention, GatedMLP(config), **self.norm)
        size = config.size("moe_intermediate_size")
        sparse = sparse_mlp(config, size, factor=config.number("route_scale", 1.0), **BY_SIGMOID)
        mlp = with_shared(sparse, config, size * config.count("num_shared_experts"))
        return SandwichLayer(config, attention, mlp, **self.norm)

    def make_decoder(self, config: ModelConfig, layers: list[DecoderLayer]) -> Decoder:
        decoder = ScaledDecoder if config.flag("mup_enabled") else Decoder
        return decoder(config, layers, **self.norm)
