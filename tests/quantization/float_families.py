"""Small models of some families, to store in FP8 and FP4: all sizes are multiples of 32."""

from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from tests.checkpoints import SMALL, random_model
from tests.quantization.float_checkpoints import Cover

_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
    "shared_expert_intermediate_size": 96,
}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "num_hidden_layers": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "head_dim": 32,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
_MAMBA = {
    "mamba_d_ssm": 128,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_moe": _EXPERTS,
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA | _EXPERTS,
    "qwen3_5": _DELTA,
    "qwen3_5_moe": _DELTA | _EXPERTS,
    "minicpm3": _LATENT,
    "deepseek_v3": _LATENT
    | {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 96,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "head_dim": 16,  # of what rotates
    },
    "falcon_h1": _MAMBA,
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention", "mlp"],
        "num_hidden_layers": 4,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "n_groups": 2,
        "ssm_state_size": 32,
        "time_step_min": 1e-9,  # otherwise transformers' prompts and steps differ
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 96,
        "moe_shared_expert_intermediate_size": 96,
    },
    "kimi_linear": {
        **_LATENT,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_heads": 2,
        "linear_head_dim": 32,
        "pad_token_id": 0,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 96,
    },
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 16},
}
"""By transformers' model type: what to change in SMALL."""
NESTED = ("qwen3_5", "qwen3_5_moe")
"""Models that also take pictures: the text model's tensors have longer names."""
_STORED = ("_proj", "in_proj_qkv", "in_proj_z", "kv_a_proj_with_mqa", ".w1", ".w2", ".w3")
COVER = Cover(
    lambda linear: linear.endswith(_STORED) and "visual" not in linear,
    [
        "lm_head",
        "re:.*(mlp|moe|mixer).gate$",
        "re:.*shared_expert_gate$",
        "re:.*in_proj_[ab]$",
        "re:.*visual.*",
    ],
    [
        *("lm_head", "*mlp.gate", "*moe.gate", "*mixer.gate", "*shared_expert_gate"),
        *("*in_proj_a", "*in_proj_b", "model.visual*", "backbone.layers.*.mixer.conv1d"),
    ],
)
"""All linears of the text model but those that choose experts or open gates."""


def save_family(path: Path, family: str) -> str:
    """Save a random float32 model of a family."""
    fields = {**SMALL, "num_hidden_layers": 2, "tie_word_embeddings": False, **FAMILIES[family]}
    if family not in NESTED:
        model = random_model(AutoConfig.for_model(family, **fields))
    else:
        sizes = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
        vision = {**sizes, "out_hidden_size": fields["hidden_size"]}
        config = AutoConfig.for_model(
            family, text_config=fields, vision_config=vision, tie_word_embeddings=False
        )
        model = random_model(config, model_class=AutoModelForImageTextToText)
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            weight.data -= 3.0  # transformers sums up to 64 logarithms of decays: small ones
        elif name.endswith("linear_attn.norm.weight"):
            weight.data *= 0.3
        elif name.endswith("norm.weight") and "qwen3_5" in family:
            weight.data -= 1.0  # 1 is added
    model.save_pretrained(path)
    return str(path)


def load_family(path: str, family: str) -> PreTrainedModel:
    """Return transformers' model at `path`."""
    model_class: Any = AutoModelForImageTextToText if family in NESTED else AutoModelForCausalLM
    model: PreTrainedModel = model_class.from_pretrained(path)
    if "moe" in family:
        model.set_experts_implementation("eager")  # the default takes only some sizes
    return model
