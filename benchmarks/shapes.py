"""The model shapes that the benchmarks measure, and the bytes that a decode step reads of them.

Knows no engine and imports no torch.
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
}
"""config.json of each model, by its name."""
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
    """Return the bytes of weights that a decode step reads: each linear layer and the head."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    attention = (2 * heads + 2 * config["num_key_value_heads"]) * head_dim * hidden
    layer = attention + 3 * hidden * config["intermediate_size"]
    weights: int = config["num_hidden_layers"] * layer + config["vocab_size"] * hidden
    return weights * WEIGHT_BITS[quantization] / 8


def kv_bytes(config: Mapping[str, Any]) -> int:
    """Return the bytes of one token's keys and values in bfloat16, over all layers."""
    numbers: int = 2 * config["num_key_value_heads"] * config["head_dim"]
    return BFLOAT16_BYTES * numbers * int(config["num_hidden_layers"])
