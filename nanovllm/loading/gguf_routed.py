"""Models with routed experts or latent attention (MLA) in a GGUF file.

kv_b_proj is two tensors there, with a part for each head: attn_k_b has the inputs of the keys'
weight first, attn_v_b the outputs. Older files have it as one. The blocks after the others are for
drafts (MTP), and are left out. Reads metadata, no weight. Imports no torch.
"""

from nanovllm.loading.gguf_family import (
    EXPERT_SIZES,
    LOCAL_EXPERT_SIZES,
    SHARED_EXPERT,
    Fields,
    GgufFamily,
    Reading,
    dense_layers,
    has_tensor,
    theta_of_windows,
    windows,
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


_NORMALISED = {"expert_weights_norm": (True,), "expert_gating_func": (2,)}  # 2: a sigmoid


def _rotating_part(config: Fields) -> Fields:
    """Return the rotary settings with the part of a head that rotates, also if that is all."""
    return {"rope_parameters": {"partial_rotary_factor": 1.0, **config["rope_parameters"]}}


def _glm4_moe(metadata: GGUFMetadata, config: Fields) -> Fields:
    return {
        **without_drafts(metadata, config),
        "first_k_dense_replace": dense_layers(metadata, config),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in metadata.tensors,
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "norm_topk_prob": metadata.setting("expert_weights_norm", check_bool, default=False),
        **_rotating_part(config),
    }


def _ernie(metadata: GGUFMetadata, config: Fields) -> Fields:
    metadata.own("expert_shared_feed_forward_length")  # of all shared experts together
    return {
        "use_bias": config["attention_bias"],
        "moe_layer_start_index": dense_layers(metadata, config),
        "moe_layer_interval": metadata.size("interleave_moe_layer_step", 1),
        "moe_num_shared_experts": metadata.size("expert_shared_count", 0),
    }


def _afmoe(metadata: GGUFMetadata, config: Fields) -> Fields:
    return {
        **windows(metadata, config, 4),
        "num_dense_layers": dense_layers(metadata, config),
        "num_shared_experts": metadata.size("expert_shared_count", 0),
        "route_scale": metadata.number("expert_weights_scale", 1.0),
        "mup_enabled": True,
    }


def _mellum(metadata: GGUFMetadata, config: Fields) -> Fields:
    """llama.cpp always normalises the weights of a token's experts."""
    theta = config["rope_parameters"]["rope_theta"]
    own = {**windows(metadata, config, 4), **theta_of_windows(metadata, config, theta)}
    return {**own, "norm_topk_prob": True}


def _laguna(metadata: GGUFMetadata, config: Fields) -> Fields:
    """Without a list of windows, every fourth layer from the first on has full attention."""
    num_layers = config["num_hidden_layers"]
    head_dim = config["head_dim"]
    metadata.own("expert_shared_count")
    heads = metadata.listed("attention.head_count", num_layers, int)
    heads = heads or [config["num_attention_heads"]] * num_layers
    gate = metadata.tensors.get("blk.0.attn_gate.weight")
    by_number = gate is not None and gate.shape[0] == heads[0] * head_dim
    dense = dense_layers(metadata, config)
    theta = theta_of_windows(metadata, config, config["rope_parameters"]["rope_theta"])
    part = metadata.size("rope.dimension_count_swa", head_dim) / head_dim
    theta["rope_parameters"]["sliding_attention"]["partial_rotary_factor"] = part
    theta["rope_parameters"]["full_attention"] = _rotating_part(config)["rope_parameters"]
    return {
        **windows(metadata, config, 4, first=0),
        "num_attention_heads_per_layer": heads,
        "gating": "per-element" if by_number else "per-head",
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (num_layers - dense),
        "moe_routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        **theta,
    }


ROUTED: dict[str, GgufFamily] = {
    "afmoe": GgufFamily(
        "AfmoeForCausalLM",
        modules={
            "attn_gate": "self_attn.gate_proj",
            "ffn_gate_inp": "mlp.router.gate",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_mlp_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        tensors={"exp_probs_b.bias": "mlp.expert_bias"},
        sizes=EXPERT_SIZES,
        fields=_afmoe,
        neutral=_NORMALISED,
    ),
    "deepseek2": GgufFamily(
        "DeepseekV3ForCausalLM",
        modules=_MODULES,
        tensors={"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
        per_head=frozenset({"attn_k_b", "attn_v_b"}),
        is_latent=True,
        fields=_deepseek,
        leaves_out_drafts=True,
    ),
    "ernie4_5-moe": GgufFamily(
        "Ernie4_5_MoeForCausalLM",
        tensors={"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
        sizes={
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        fields=_ernie,
        readings=lambda config: {"exp_probs_b": Reading(axis=0)},
    ),
    "glm4moe": GgufFamily(
        "Glm4MoeForCausalLM",
        modules={"post_attention_norm": "post_attention_layernorm"},
        tensors={"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
        sizes={
            **EXPERT_SIZES,
            "expert_count": "n_routed_experts",
            "expert_shared_count": "n_shared_experts",
        },
        partial_rotation=True,
        fields=_glm4_moe,
        neutral={"expert_gating_func": (2,)},
        leaves_out_drafts=True,
    ),
    "laguna": GgufFamily(
        "LagunaForCausalLM",
        modules={**SHARED_EXPERT, "attn_gate": "self_attn.g_proj"},
        tensors={"exp_probs_b.bias": "mlp.experts.e_score_correction_bias"},
        per_layer=frozenset({"attention.head_count"}),
        sizes={
            **EXPERT_SIZES,
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
        partial_rotation=True,
        fields=_laguna,
        neutral=_NORMALISED,
    ),
    "mellum": GgufFamily(
        "MellumForCausalLM",
        sizes=EXPERT_SIZES,
        fields=_mellum,
        neutral={"expert_gating_func": (1,)},  # a softmax
    ),
    "minicpm3": GgufFamily(
        "MiniCPM3ForCausalLM",
        modules=_MODULES,
        is_latent=True,
        fields=lambda metadata, config: {
            **latent_fields(metadata, config),
            "v_head_dim": config["hidden_size"] // config["num_attention_heads"],
        },
    ),
    "minimax-m2": GgufFamily(
        "MiniMaxM2ForCausalLM",
        modules={
            "ffn_gate_inp": "block_sparse_moe.gate",
            "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
            "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
            "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
        },
        tensors={"exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"},
        sizes=LOCAL_EXPERT_SIZES,
        partial_rotation=True,
        fields=lambda metadata, config: _rotating_part(config),
        neutral=_NORMALISED,
    ),
}
