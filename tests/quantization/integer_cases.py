"""The layouts of integers that are tested, by name: what writes a linear, and the settings."""

import os
from collections.abc import Callable
from typing import Any

import torch

from tests.quantization import quantised

EVERY = "FORMAT_CASES" in os.environ
"""Whether all cases run in all families."""
BY_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
STATIC = {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": True, "dynamic": False}

Case = tuple[Callable[[str, torch.Tensor], Any], dict[str, Any]]


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return a quantization_config as llmcompressor writes it."""
    return {
        "quant_method": "compressed-tensors",
        "format": group["format"],
        "config_groups": {"group_0": {"targets": ["Linear"], **group}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def case(
    stored: str,
    bits: int,
    group: int | None,
    inputs: dict[str, Any] | None = None,
    *,
    symmetric: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    actorder: str | None = None,
) -> Case:
    """Return a case of compressed-tensors.

    Args:
        stored: the `format`.
        group: None: a scale for each channel.
        dtype: of the scales.
    """
    weights: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": symmetric}
    weights["strategy"] = "channel" if group is None else "group"
    if group is not None:
        weights["group_size"] = group
    scheme = {"weights": weights, "input_activations": inputs, "format": stored}
    linear = quantised.compressed(scheme, dtype)
    if actorder is None:
        return linear, settings_of(scheme)
    changed = {**scheme, "weights": {**weights, "actorder": actorder}}
    return (quantised.ordered(linear) if actorder == "group" else linear), settings_of(changed)


def gptq(bits: int, group: int, *, version: int = 1, **options: Any) -> Case:
    settings = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": options.get("symmetric", True),
        "desc_act": options.get("desc_act", False),
        "checkpoint_format": {1: "gptq", 2: "gptq_v2"}[version],
        "lm_head": False,
        "true_sequential": True,
        "damp_percent": 0.1,
    }
    return quantised.gptq(bits, group, less=2 - version, **options), settings


def awq(group: int) -> Case:
    settings = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }
    return quantised.awq(group), settings


PACKED, BYTES = "pack-quantized", "int-quantized"
CASES: dict[str, Case] = {
    "W4A16 g128": case(PACKED, 4, 128),
    "W4A16 g32 asymmetric": case(PACKED, 4, 32, symmetric=False, dtype=torch.float16),
    "W4A16 g64 group order": case(PACKED, 4, 64, actorder="group"),
    "W4A16 g64 static order": case(PACKED, 4, 64, actorder="static"),
    "W4A16 channel": case(PACKED, 4, None, dtype=torch.float32),
    "W4A16 g16": case(PACKED, 4, 16),
    "W8A16 g64": case(PACKED, 8, 64),
    "W8A16 channel asymmetric": case(PACKED, 8, None, symmetric=False),
    "W8A8": case(BYTES, 8, None, BY_TOKEN),
    "W8A8 static": case(BYTES, 8, None, STATIC),
    "W8A16 bytes g128 asymmetric": case(BYTES, 8, 128, symmetric=False),
    "W4A8 bytes": case(BYTES, 4, 128, BY_TOKEN),
    "W8A16 naive": case("naive-quantized", 8, 32),
    "GPTQ": gptq(4, 128),
    "GPTQ asymmetric": gptq(4, 64, symmetric=False, g_idx=False),
    "GPTQ v2 asymmetric": gptq(4, 32, version=2, symmetric=False),
    "GPTQ 8 bits": gptq(8, -1, bias=True),
    "GPTQ 8 bits asymmetric": gptq(8, 64, symmetric=False),
    "GPTQ desc_act": gptq(4, 32, desc_act=True),
    "GPTQ 8 bits desc_act asymmetric": gptq(8, 64, desc_act=True, symmetric=False),
    "AWQ": awq(128),
    "AWQ g64": awq(64),
    "AWQ channel": awq(-1),
}
BY_LAYOUT = {
    "packed": "W4A16 g32 asymmetric",
    "ordered": "W4A16 g64 group order",
    "bytes": "W4A8 bytes",
    "GPTQ": "GPTQ desc_act",
    "GPTQ v1": "GPTQ",
    "AWQ": "AWQ g64",
}
"""One case of each layout."""
WIDENED = ("W4A16 g16",)
"""The cases that no kernel holds."""
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
    },
    "minicpm3": LATENT,
    "deepseek_v3": {
        **LATENT,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 128,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
    "falcon_h1": {
        "mamba_d_ssm": 128,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 2,
        "mamba_d_state": 32,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention", "mlp"],
        "num_hidden_layers": 4,
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "n_groups": 2,
        "ssm_state_size": 32,
        "time_step_min": 1e-9,  # otherwise transformers' prompts and steps differ
        "n_routed_experts": 8,
        "num_experts_per_tok": 8,  # all: of some, a rounded hidden state might choose others
        "moe_intermediate_size": 128,
        "moe_shared_expert_intermediate_size": 128,
    },
}
