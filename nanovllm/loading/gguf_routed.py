"""Models with routed experts in a GGUF file: GLM-4-MoE, ERNIE 4.5, Trinity, MiniMax-M2, Mellum 2
and Laguna.

The blocks after the others are for drafts (MTP), and are left out. Reads metadata, no weight.
Imports no torch.
"""

from nanovllm.loading.gguf_family import (
    EXPERT_SIZES,
    EXPERTS,
    SHARED_EXPERT,
    SHARED_EXPERTS,
    Fields,
    GgufFamily,
    Reading,
    dense_layers,
    theta_of_windows,
    windows,
    without_drafts,
)
from nanovllm.loading.gguf_header import GGUFMetadata
from nanovllm.options.validation import check_bool

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
    window = metadata.size("attention.sliding_window", 0)
    slides = metadata.listed("attention.sliding_window_pattern", num_layers, bool)
    slides = slides or [index % 4 > 0 for index in range(num_layers)]
    types = ["sliding_attention" if window and each else "full_attention" for each in slides]
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
        "sliding_window": window or None,
        "layer_types": types,
        "num_attention_heads_per_layer": heads,
        "gating": "per-element" if by_number else "per-head",
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (num_layers - dense),
        "moe_routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        **theta,
    }


GLM4_MOE = GgufFamily(
    "Glm4MoeForCausalLM",
    modules={
        **EXPERTS,
        **SHARED_EXPERTS,
        "ffn_gate_inp": "mlp.gate",
        "post_attention_norm": "post_attention_layernorm",
    },
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
)
ERNIE4_5_MOE = GgufFamily(
    "Ernie4_5_MoeForCausalLM",
    modules={**EXPERTS, **SHARED_EXPERTS, "ffn_gate_inp": "mlp.gate"},
    tensors={"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
    sizes={
        "expert_count": "moe_num_experts",
        "expert_used_count": "moe_k",
        "expert_feed_forward_length": "moe_intermediate_size",
    },
    fields=_ernie,
    readings=lambda config: {"exp_probs_b": Reading(axis=0)},
)
AFMOE = GgufFamily(
    "AfmoeForCausalLM",
    modules={
        **EXPERTS,
        **SHARED_EXPERTS,
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
)
MINIMAX_M2 = GgufFamily(
    "MiniMaxM2ForCausalLM",
    modules={
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    },
    tensors={"exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"},
    sizes={
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "intermediate_size",
    },
    partial_rotation=True,
    fields=lambda metadata, config: _rotating_part(config),
    neutral=_NORMALISED,
)
MELLUM = GgufFamily(
    "MellumForCausalLM",
    modules={**EXPERTS, "ffn_gate_inp": "mlp.gate"},
    sizes=EXPERT_SIZES,
    fields=_mellum,
    neutral={"expert_gating_func": (1,)},  # a softmax
)
LAGUNA = GgufFamily(
    "LagunaForCausalLM",
    modules={
        **EXPERTS,
        **SHARED_EXPERT,
        "attn_gate": "self_attn.g_proj",
        "ffn_gate_inp": "mlp.gate",
    },
    tensors={"exp_probs_b.bias": "mlp.experts.e_score_correction_bias"},
    per_layer=frozenset({"attention.head_count"}),
    sizes={
        **EXPERT_SIZES,
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
    partial_rotation=True,
    fields=_laguna,
    neutral=_NORMALISED,
)
