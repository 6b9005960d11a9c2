"""The model shapes that the benchmarks measure, and the bytes that a decode step reads of them.

Imports torch only to count weights.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import QWEN3_06B

SMALL = "Qwen3-0.6B"
CONFIGS: dict[str, dict[str, Any]] = {
    SMALL: QWEN3_06B,
    "Qwen3-4B": {
        **QWEN3_06B,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "Qwen3-8B": {
        **QWEN3_06B,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "Qwen3-32B": {
        **QWEN3_06B,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "tie_word_embeddings": False,
    },
    "Llama-3.2-1B": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
    "Qwen3.5-0.8B": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "hidden_act": "silu",
        "attention_bias": False,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    },
    "Gemma-3-1B": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": 262144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 32768,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "rope_local_base_freq": 10000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
    "Qwen3-MoE-64": {
        **QWEN3_06B,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 384,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "gpt-oss-3L": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 3,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "hidden_act": "silu",
        "attention_bias": True,
        "initial_context_length": 4096,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "max_position_embeddings": 131072,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    "LFM2-1.2B": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "vocab_size": 65536,
        "hidden_size": 2048,
        "intermediate_size": 12288,
        "block_dim": 2048,
        "block_ff_dim": 12288,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "conv_L_cache": 3,
        "conv_bias": False,
        "layer_types": [
            *["conv", "conv", "full_attention"] * 3,
            *["conv", "full_attention"] * 3,
            "conv",
        ],
        "max_position_embeddings": 128000,
        "norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
    "LFM3-1.7B": {
        "architectures": ["Lfm3ForCausalLM"],
        "model_type": "lfm3",
        "vocab_size": 128000,
        "hidden_size": 2048,
        "intermediate_size": 7680,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "conv_L_cache": 7,
        "conv_bias": False,
        "layer_types": [
            "conv",
            "conv",
            "full_attention",
            "conv",
            *["sliding_attention", "conv", "full_attention", "conv"] * 5,
        ],
        "sliding_window": 256,
        "use_sandwich_norm": True,
        "use_attention_gate": True,
        "max_position_embeddings": 128000,
        "norm_eps": 1e-5,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1000000.0,
                "partial_rotary_factor": 0.5,
            },
        },
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    },
    "Nemotron-3-4B": {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "vocab_size": 131072,
        "hidden_size": 3136,
        "intermediate_size": 12544,
        "num_hidden_layers": 42,
        "hybrid_override_pattern": "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-",
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "mamba_num_heads": 96,
        "mamba_head_dim": 80,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "chunk_size": 128,
        "mlp_hidden_act": "relu2",
        "use_conv_bias": True,
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
    "GLM-4.7-Flash-8L": {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        "vocab_size": 154880,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000,
        "partial_rotary_factor": 1.0,
        "max_position_embeddings": 202752,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
    "Granite-4-H-Tiny-20L": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "vocab_size": 100352,
        "hidden_size": 1536,
        "intermediate_size": 512,
        "shared_intermediate_size": 1024,
        "num_hidden_layers": 20,
        "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 2,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "num_local_experts": 64,
        "num_experts_per_tok": 6,
        "mamba_n_heads": 48,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 256,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "position_embedding_type": "nope",
        "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12,
        "residual_multiplier": 0.22,
        "logits_scaling": 6,
        "hidden_act": "silu",
        "attention_bias": False,
        "normalization_function": "rmsnorm",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
}
"""config.json of each model, by its name. Those with a number of layers, "8L", are cut down, and so
is the mixture of experts."""
BFLOAT16_BYTES = 2
WEIGHT_BITS = {None: 16, "int8": 8 + 16 / 128, "int4": 4 + 16 / 32}
"""Bits per weight by quantization. A bfloat16 scale per group is included."""


def checkpoint(model: str | None, directory: str) -> tuple[str, str]:
    """Return the model and its load_format.

    If `model` is a name in CONFIGS (None: SMALL), write that config to `directory`, for random
    weights. A directory with a config.json and no weights has random ones too.
    """
    if model is not None and model not in CONFIGS:
        bare = Path(model).is_dir() and not any(Path(model).glob("*.safetensors"))
        return model, "dummy" if bare else "auto"
    Path(directory, "config.json").write_text(json.dumps(CONFIGS[model or SMALL]), encoding="utf-8")
    return directory, "dummy"


def described(model: str | None) -> str:
    """Return what `checkpoint` makes of `model`, in words."""
    shape = model or SMALL
    return f"random weights, {shape}'s shape" if shape in CONFIGS else shape


def read_config(model: str) -> dict[str, Any]:
    """Return the config.json of a checkpoint's directory."""
    config: dict[str, Any] = json.loads(Path(model, "config.json").read_text(encoding="utf-8"))
    return config


def weight_bytes(config: Mapping[str, Any], quantization: str | None = None) -> float:
    """Return the bytes of weights that a decode step of one token reads: each matrix once, of
    experts the chosen ones, and of an embedding that is not the head a row, which is left out.
    """
    import torch
    from torch import nn

    from nanovllm.features.quantization.rounding import EXACT
    from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
    from nanovllm.layers.experts import SparseMLP, StackedLinear
    from nanovllm.layers.linear import WeightModule
    from nanovllm.models.registry import read_config as read_fields
    from nanovllm.worker.model_loader import make_modules

    network = make_modules(read_fields(dict(config)), 1, torch.device("meta"))
    chosen: dict[nn.Module, float] = {
        linear: mlp.gate.choice.top_k / mlp.experts.down_proj.num_experts
        for mlp in network.modules()
        if isinstance(mlp, SparseMLP)
        for linear in mlp.experts.modules()
        if isinstance(linear, StackedLinear)
    }
    total = 0.0
    for module in network.modules():
        is_head = isinstance(module, ParallelLMHead)
        if not isinstance(module, WeightModule) or module.weight is None:
            continue
        if isinstance(module, VocabParallelEmbedding) and not is_head:
            continue
        bits = WEIGHT_BITS[None if isinstance(module, EXACT) else quantization]
        total += module.weight.numel() * chosen.get(module, 1) * bits / 8
    return total


def num_mixers(config: Mapping[str, Any]) -> int:
    """Return the number of layers that keep a state, and no keys and values."""
    found: int = config.get("layer_types", []).count("linear_attention")
    return found


def kv_bytes(config: Mapping[str, Any]) -> int:
    """Return the bytes of one token's keys and values in bfloat16, over all layers."""
    numbers: int = 2 * config["num_key_value_heads"] * config["head_dim"]
    return BFLOAT16_BYTES * numbers * (int(config["num_hidden_layers"]) - num_mixers(config))
