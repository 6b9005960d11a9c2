"""The model shapes that the benchmarks measure, and the bytes that a decode step reads of them.

Does not import torch.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import QWEN3_06B

SMALL = "Qwen3-0.6B"
CONFIGS: dict[str, dict[str, Any]] = {
    SMALL: QWEN3_06B,
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
}
"""config.json of each model, by its name. The last two are cut down."""
BFLOAT16_BYTES = 2
WEIGHT_BITS = {None: 16, "int8": 8 + 16 / 128, "int4": 4 + 16 / 32}
"""Bits per weight by quantization. A bfloat16 scale per group is included."""


def checkpoint(model: str | None, directory: str) -> tuple[str, str]:
    """Return the model and its load_format.

    If `model` is a name in CONFIGS (None: SMALL), write that config to `directory`, for random
    weights.
    """
    if model is not None and model not in CONFIGS:
        return model, "auto"
    Path(directory, "config.json").write_text(json.dumps(CONFIGS[model or SMALL]))
    return directory, "dummy"


def described(model: str | None) -> str:
    """Return what `checkpoint` makes of `model`, in words."""
    shape = model or SMALL
    return f"random weights, {shape}'s shape" if shape in CONFIGS else shape


def read_config(model: str) -> dict[str, Any]:
    """Return the config.json of a checkpoint's directory."""
    config: dict[str, Any] = json.loads(Path(model, "config.json").read_text())
    return config


def weight_bytes(config: Mapping[str, Any], quantization: str | None = None) -> float:
    """Return the bytes of weights that a decode step reads: each linear layer and the head.

    With experts, those of one token.
    """
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    mixers = num_mixers(config)
    gate = heads if mixers else 0  # as in Qwen3.5
    attention = (2 * heads + gate + 2 * config["num_key_value_heads"]) * head_dim * hidden
    size = config.get("moe_intermediate_size", config["intermediate_size"])
    layers = config["num_hidden_layers"]
    mlp = 3 * hidden * size * config.get("num_experts_per_tok", 1)
    weights: int = layers * mlp + (layers - mixers) * attention + config["vocab_size"] * hidden
    small = 0
    if mixers:
        kinds = ("key", "value")
        keys, values = (
            config[f"linear_num_{kind}_heads"] * config[f"linear_{kind}_head_dim"] for kind in kinds
        )
        weights += mixers * (2 * keys + 3 * values) * hidden
        small = mixers * 2 * config["linear_num_value_heads"] * hidden  # these keep their bits
    return (weights * WEIGHT_BITS[quantization] + small * WEIGHT_BITS[None]) / 8


def num_mixers(config: Mapping[str, Any]) -> int:
    """Return the number of layers that keep a state, and no keys and values."""
    found: int = config.get("layer_types", []).count("linear_attention")
    return found


def kv_bytes(config: Mapping[str, Any]) -> int:
    """Return the bytes of one token's keys and values in bfloat16, over all layers."""
    numbers: int = 2 * config["num_key_value_heads"] * config["head_dim"]
    return BFLOAT16_BYTES * numbers * (int(config["num_hidden_layers"]) - num_mixers(config))
