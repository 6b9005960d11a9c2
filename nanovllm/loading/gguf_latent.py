"""Models with latent attention (MLA) in a GGUF file: DeepSeek V2 and V3, GLM-4.7-Flash, MiniCPM3.

kv_b_proj is two tensors there, with a part for each head: attn_k_b has the inputs of the keys'
weight first, attn_v_b the outputs. Older files have it as one. The blocks after the others are for
drafts (MTP), and are left out. Reads metadata, no weight. Imports no torch.
"""

from nanovllm.loading.gguf_family import (
    EXPERTS,
    SHARED_EXPERTS,
    Fields,
    GgufFamily,
    dense_layers,
    has_tensor,
    without_drafts,
)
from nanovllm.loading.gguf_header import GGUFMetadata
from nanovllm.options.validation import check_bool

_SIGMOID = 2


def latent_fields(metadata: GGUFMetadata, config: Fields) -> Fields:
    """Return the sizes of latent attention."""
    rotating = config["head_dim"]
    key = metadata.size("attention.key_length")
    value = metadata.size("attention.value_length", config["hidden_size"])
    key = metadata.size("attention.key_length_mla", key)
    if key <= rotating:
        rule = f"above rope.dimension_count {rotating}"
        raise metadata.unsupported("attention.key_length_mla", key, rule)
    return {
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": metadata.size("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": metadata.size("attention.kv_lora_rank"),
        "qk_nope_head_dim": key - rotating,
        "qk_rope_head_dim": rotating,
        "v_head_dim": metadata.size("attention.value_length_mla", value),
    }


def _deepseek(metadata: GGUFMetadata, config: Fields) -> Fields:
    has_bias = has_tensor(metadata, ".exp_probs_b.bias")
    gating = metadata.size("expert_gating_func", _SIGMOID if has_bias else 1)
    if gating not in (1, _SIGMOID):
        raise metadata.unsupported("expert_gating_func", gating, "1 (softmax) or 2 (sigmoid)")
    is_sigmoid = gating == _SIGMOID
    groups = metadata.size("expert_group_count", 1)
    return {
        **latent_fields(metadata, config),
        **without_drafts(metadata, config),
        "architectures": [f"DeepseekV{3 if is_sigmoid else 2}ForCausalLM"],
        "first_k_dense_replace": dense_layers(metadata, config),
        "n_routed_experts": metadata.size("expert_count", 0),
        "num_experts_per_tok": metadata.size("expert_used_count", 1),
        "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
        "n_shared_experts": metadata.size("expert_shared_count", 0),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "norm_topk_prob": metadata.setting("expert_weights_norm", check_bool, default=False),
        "n_group": groups,
        "topk_group": metadata.size("expert_group_used_count", 1),
        "topk_method": _choice(is_sigmoid, groups),
        "rope_parameters": _rope(config),
    }


def _choice(is_sigmoid: bool, groups: int) -> str:
    if is_sigmoid:
        return "noaux_tc"
    return "greedy" if groups == 1 else "group_limited_greedy"


def _rope(config: Fields) -> Fields:
    """Return the rotary settings. The file has a tenth of mscale_all_dim, and mscale is equal."""
    rope: Fields = config["rope_parameters"]
    if (tenth := rope.get("mscale_all_dim")) is None:
        return rope
    return {**rope, "mscale": 10 * tenth, "mscale_all_dim": 10 * tenth}


_MODULES = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj.{}",
    "attn_v_b": "self_attn.v_b_proj.{}",
}
DEEPSEEK2 = GgufFamily(
    "DeepseekV3ForCausalLM",
    modules={**_MODULES, **EXPERTS, **SHARED_EXPERTS, "ffn_gate_inp": "mlp.gate"},
    tensors={"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
    per_head=frozenset({"attn_k_b", "attn_v_b"}),
    is_latent=True,
    fields=_deepseek,
    leaves_out_drafts=True,
)
MINICPM3 = GgufFamily(
    "MiniCPM3ForCausalLM",
    modules=_MODULES,
    is_latent=True,
    fields=lambda metadata, config: {
        **latent_fields(metadata, config),
        "v_head_dim": config["hidden_size"] // config["num_attention_heads"],
    },
)
"""Its multipliers are in no key: they are those of the one model of this kind."""
