"""A small config.json of each supported architecture, with the fields that published ones have."""

from typing import Any

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
    "attention_bias": False,
}
SILU: dict[str, Any] = {**SIZES, "hidden_act": "silu", "rope_theta": 10_000.0}
BY_THREE = (["sliding_attention"] * 2 + ["full_attention"]) * 2
BY_TWO = ["sliding_attention", "full_attention"] * 3
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 512,
    "truncate": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
GEMMA2 = {
    **SIZES,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 16,
    "sliding_window": 32,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "layer_types": BY_TWO,
    "rope_theta": 10_000.0,
}
GEMMA3 = {
    **GEMMA2,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "layer_types": BY_THREE,
    "sliding_window_pattern": 3,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
GEMMA4 = {
    **SIZES,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 32,
    "layer_types": BY_THREE,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 300,
    "final_logit_softcapping": 30.0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1_000_000.0,
        },
    },
}
GEMMA4_EXPERTS = {
    **GEMMA4,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}
MISTRAL = {**SILU, "sliding_window": 32}
MINISTRAL3 = {
    **SIZES,
    "hidden_act": "silu",
    "sliding_window": None,
    "rope_parameters": {**YARN, "rope_theta": 1e6, "llama_4_scaling_beta": 0.1},
}
FALCON_H1 = {
    **SILU,
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 0.9375,
    "embedding_multiplier": 5.656854249492381,
    "key_multiplier": 0.390625,
    "lm_head_multiplier": 0.0390625,
    "mamba_chunk_size": 16,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 16,
    "mamba_d_ssm": 64,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_n_groups": 2,
    "mamba_n_heads": 4,
    "mamba_norm_before_gate": False,
    "mamba_proj_bias": False,
    "mamba_rms_norm": True,
    "mlp_bias": False,
    "mlp_multipliers": [0.8838834764831844, 0.5859375],
    "projectors_bias": False,
    "rope_scaling": None,
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.35355339059327373, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    "ssm_out_multiplier": 0.23570226039551587,
}
QWEN3_5 = {
    **SIZES,
    "hidden_act": "silu",
    "layer_types": (["linear_attention"] * 2 + ["full_attention"]) * 2,
    "full_attention_interval": 3,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "attn_output_gate": True,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
}
QWEN3_5_MOE = {
    **QWEN3_5,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
GRANITE = {
    **SILU,
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
GRANITE_MOE = {**GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2}
LFM3 = {
    **{name: value for name, value in SIZES.items() if name != "rms_norm_eps"},
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 7,
    "sliding_window": 32,
    "layer_types": ["conv", "full_attention", "sliding_attention"] * 2,
    "use_sandwich_norm": True,
    "use_attention_gate": True,
    "rope_parameters": GEMMA4["rope_parameters"],
}
LFM2 = {
    **SIZES,
    "layer_types": ["conv", "full_attention", "conv"] * 2,
    "norm_eps": 1e-5,
    "conv_L_cache": 3,
    "conv_bias": False,
    "rope_theta": 1_000_000.0,
}
LATENT = {
    **{key: value for key, value in SIZES.items() if key != "head_dim"},
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
DEEPSEEK = {
    **LATENT,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.5,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 1024,
    },
}
VISION = {"model_type": "vision", "hidden_size": 8}
MROPE = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}


def nested(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of a model whose text model is in a part of its own."""
    return {"text_config": config, "vision_config": VISION, "tie_word_embeddings": True}


CONFIGS: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": {
        **DEEPSEEK,
        "q_lora_rank": None,
        "scoring_func": "softmax",
        "topk_method": "group_limited_greedy",
        "norm_topk_prob": False,
        "n_group": 4,
        "topk_group": 2,
    },
    "DeepseekV3ForCausalLM": {
        **DEEPSEEK,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "n_group": 4,
        "topk_group": 2,
    },
    "Ernie4_5ForCausalLM": {**SILU, "use_bias": True},
    "Exaone4ForCausalLM": {
        **SILU,
        "sliding_window": 32,
        "sliding_window_pattern": "LLG",
        "layer_types": BY_THREE,
        "rope_scaling": LLAMA3,
    },
    "FalconH1ForCausalLM": FALCON_H1,
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": nested(GEMMA3),
    "Gemma4ForCausalLM": GEMMA4,
    "Gemma4ForConditionalGeneration": {**nested(GEMMA4_EXPERTS), "audio_config": VISION},
    "Gemma4UnifiedForCausalLM": GEMMA4_EXPERTS,
    "Gemma4UnifiedForConditionalGeneration": nested(GEMMA4),
    "Glm4MoeLiteForCausalLM": {
        **DEEPSEEK,
        "rope_scaling": None,
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "partial_rotary_factor": 1.0,
    },
    "GptOssForCausalLM": {
        **SILU,
        "attention_bias": True,
        "sliding_window": 32,
        "layer_types": BY_TWO,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_scaling": YARN,
    },
    "GraniteForCausalLM": {**GRANITE, "mlp_bias": False},
    "GraniteMoeForCausalLM": GRANITE_MOE,
    "GraniteMoeHybridForCausalLM": {
        **GRANITE_MOE,
        "layer_types": (["mamba"] * 2 + ["attention"]) * 2,
        "position_embedding_type": "nope",
        "shared_intermediate_size": 96,
        "mamba_chunk_size": 16,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 8,
        "mamba_proj_bias": False,
        "normalization_function": "rmsnorm",
        "init_method": "mup",
    },
    "GraniteMoeSharedForCausalLM": {**GRANITE_MOE, "shared_intermediate_size": 40},
    "HunYuanDenseV1ForCausalLM": {
        **SILU,
        "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "mscale": 1.0},
    },
    "Lfm2ForCausalLM": {
        **LFM2,
        "layer_types": None,
        "full_attn_idxs": [1, 4],
        "block_ff_dim": 96,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 16,
    },
    "Lfm2MoeForCausalLM": {
        **LFM2,
        "num_dense_layers": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
    },
    "Lfm3ForCausalLM": LFM3,
    "Lfm3VlForConditionalGeneration": nested(LFM3),
    "LlamaForCausalLM": {**SILU, "mlp_bias": False, "rope_scaling": LLAMA3},
    "MiniCPM3ForCausalLM": {
        **LATENT,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 32,
        "rope_theta": 10_000.0,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 512,
        },
    },
    "Ministral3ForCausalLM": MINISTRAL3,
    "Mistral3ForConditionalGeneration": nested(MINISTRAL3),
    "Mistral4ForCausalLM": {
        **{key: value for key, value in DEEPSEEK.items() if key != "rope_scaling"},
        "first_k_dense_replace": 0,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "rope_interleave": True,
        "rope_parameters": {
            "type": "yarn",
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 512,
            "max_position_embeddings": 4096,
            "llama_4_scaling_beta": 0.1,
            "partial_rotary_factor": 1 / 3,
        },
    },
    "MistralForCausalLM": MISTRAL,
    "MixtralForCausalLM": {**MISTRAL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "MuseGlimmerForConditionalGeneration": nested(
        {
            **SILU,
            "sliding_window": 32,
            "qk_scale_factor": 3.87,
            "output_multiplier": 0.2,
            "final_logit_softcapping": 20.0,
            "post_norm_eps": 1e-8,
            "layer_types": BY_THREE,
            "layer_rope_theta": [1e4, 1e4, 0, 1e4, 1e4, 0],
        }
    ),
    "Olmo2ForCausalLM": {**SILU, "rope_scaling": None},
    "Olmo3ForCausalLM": {
        **SILU,
        "sliding_window": 32,
        "layer_types": BY_THREE,
        "rope_scaling": {**YARN, "attention_factor": 1.2},
    },
    "Phi3ForCausalLM": {
        **SILU,
        "sliding_window": 32,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 512,
        "rope_scaling": LONGROPE,
    },
    "Qwen2ForCausalLM": {**SILU, "use_sliding_window": False, "sliding_window": 32},
    "Qwen3ForCausalLM": {**SILU, "use_sliding_window": False, "rope_scaling": YARN},
    "Qwen3MoeForCausalLM": {
        **SILU,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [1],
    },
    "Qwen3NextForCausalLM": {
        **QWEN3_5_MOE,
        "layer_types": None,
        "rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [1],
    },
    "Qwen3VLForConditionalGeneration": nested({**SILU, "rope_scaling": MROPE}),
    "Qwen3_5ForCausalLM": QWEN3_5,
    "Qwen3_5ForConditionalGeneration": nested(QWEN3_5),
    "Qwen3_5MoeForCausalLM": QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": nested(QWEN3_5_MOE),
    "SeedOssForCausalLM": {**SILU, "attention_out_bias": False, "mlp_bias": False},
    "SmolLM3ForCausalLM": {
        **SILU,
        "no_rope_layers": [1, 1, 0, 1, 1, 0],
        "no_rope_layer_interval": 3,
        "use_sliding_window": True,
        "sliding_window": 32,
        "layer_types": BY_THREE,
        "mlp_bias": False,
    },
}
"""By architecture, without the field that names it: see `config_of`."""


def config_of(architecture: str) -> dict[str, Any]:
    """Return the whole config.json."""
    return {"architectures": [architecture], **CONFIGS[architecture]}
