"""The Ling 3 family: Kimi Delta Attention, and latent attention with a gate for each head."""

import dataclasses
from typing import Any, ClassVar

from nanovllm.models.config_fields import config_number
from nanovllm.models.decoder import DecoderLayer
from nanovllm.models.deepseek import DeepseekV3ForCausalLM
from nanovllm.models.hybrid_parts import check_mixed
from nanovllm.models.kimi_linear import KIMI_ALIASES, KIMI_NAMES, TYPES, kimi_delta
from nanovllm.models.mla_parts import LatentAttention
from nanovllm.models.model_config import ModelConfig
from nanovllm.options.validation import unsupported


class BailingHybridForCausalLM(DeepseekV3ForCausalLM):
    """Ling 3.0 Flash: five of six layers have Kimi Delta Attention, which keeps a state; the sixth
    has latent attention with a gate for each head; experts in groups, and one that all tokens
    share.
    """

    names: ClassVar[dict[str, str]] = KIMI_NAMES
    published: ClassVar[dict[str, str]] = {
        "forget_gate.": "",
        "self_attn.": "attention.",
        "embed_tokens.": "word_embeddings.",
        "e_score_correction_bias": "expert_bias",
    }
    aliases: ClassVar[dict[str, str]] = KIMI_ALIASES
    ignores = frozenset({"q_lora_rank", "rope_interleave", "rotary_dim"})
    reads = frozenset({"layer_types", "num_experts", "num_local_experts", "partial_rotary_factor"})
    only: ClassVar[dict[str, tuple[Any, ...]]] = {
        "gated_attention_proj_granularity_type": ("head_wise",),
        "linear_silu": (True,),
        "moe_router_enable_expert_bias": (True,),
        "no_kda_lora": (True,),
        "score_function": ("sigmoid",),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "use_bias": (False,),
        "use_kda_lora": (False,),
        "use_mla_nope": (False,),
        "use_qkv_bias": (False,),
    }

    def __init__(self, config: ModelConfig, max_model_len: int) -> None:
        for key in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"):
            if any(config.per_layer(key) or ()):
                raise unsupported(f"config.json: {key}", config.fields[key], "zeros")
        # In the published config.json partial_rotary_factor is the share of qk_rope_head_dim in a
        # head of Kimi Delta Attention: it changes nothing.
        rope = dataclasses.replace(config.rope, partial=1.0)
        super().__init__(dataclasses.replace(config, rope=rope), max_model_len)

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        mlp = self.make_mlp(config, index)
        every = config.size("layer_group_size")
        layers = range(1, config.num_layers + 1)
        types = config.layer_types_of(TYPES, [TYPES[number % every == 0] for number in layers])
        if check_mixed(types)[index] == "full_attention":
            bias = config.flag("attention_bias")
            attention = LatentAttention(config, self.latent_rope(config), bias=bias, gated=True)
            return DecoderLayer(config, attention, mlp)
        fields = {
            "linear_num_heads": config.num_heads,
            "linear_head_dim": config.fields["head_dim"],
            "linear_conv_kernel_dim": config.fields["short_conv_kernel_size"],
        }
        fields |= {key: value for key, value in config.fields.items() if value is not None}
        bound = None
        if config.flag("kda_safe_gate"):
            bound = config_number(fields, "kda_lower_bound", -5.0, -1e3, -1e-3)
        return DecoderLayer(config, kimi_delta(config, fields, low_rank=False, bound=bound), mlp)

    def published_names(self, name: str) -> tuple[str, ...]:
        (published,) = super().published_names(name)
        return published, published.replace("attention.o_proj.", "attention.dense.")
