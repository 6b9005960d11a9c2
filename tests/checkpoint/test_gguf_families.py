"""GGUF files of each architecture beside transformers' model with the same weights."""

import random

import pytest
from transformers import AutoConfig

from nanovllm.checkpoint.gguf_families import FAMILIES
from tests.checkpoints import random_model
from tests.gguf_converter import convert
from tests.models.test_decoder import assert_logits_agree

SIZES = {
    "vocab_size": 301,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [2.0, 2.1, 2.2, 2.3, 2.4, 2.5],
}
SLIDING, FULL = "sliding_attention", "full_attention"
TYPES = [SLIDING, SLIDING, SLIDING, FULL]
EXPERTS = {"num_experts_per_tok": 2, "tie_word_embeddings": False}
CASES = {
    "gemma2": {"sliding_window": 17, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    "gemma3": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "sliding_window": 17,
        "query_pre_attn_scalar": 16,
        "rope_parameters": {
            FULL: {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
            SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        },
    },
    "gemma4": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 6,
        "layer_types": [SLIDING, FULL] * 3,
        "sliding_window": 17,
        "global_head_dim": 32,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": 301,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 5.0,
    },
    "gemma4 with values from keys": {
        "model_type": "gemma4_text",
        "layer_types": [SLIDING, FULL] * 2,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
    },
    "mistral3": {
        "model_type": "ministral3",
        "rope_parameters": {
            **YARN,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "mistral3 without yarn": {"model_type": "mistral"},  # Mistral Small 3.1
    "phi3": {"sliding_window": 40, "tie_word_embeddings": False},
    "phi3 with short texts": {
        "rope_parameters": {**LONG},
        "original_max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    "phi3 with long texts": {
        "rope_parameters": {**LONG},
        "original_max_position_embeddings": 2,
        "max_position_embeddings": 128,
        "num_hidden_layers": 1,  # the factor on its scores is so large that more would amplify
        "tie_word_embeddings": True,
    },
    "granite": {
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "olmo2": {},
    "olmo3": {
        "sliding_window": 17,
        "layer_types": TYPES,
        "rope_parameters": {
            FULL: {**YARN, "attention_factor": 1.3, "beta_fast": 20.0, "beta_slow": 2.0},
            SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        },
    },
    "smollm3": {"tie_word_embeddings": True},
    "qwen3moe": {
        "model_type": "qwen3_moe",
        "num_experts": 5,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        **EXPERTS,
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        "num_local_experts": 5,
        "sliding_window": 17,
        "layer_types": [SLIDING, FULL] * 2,
        "rope_parameters": {**YARN, "truncate": False},
        **EXPERTS,
    },
    "exaone4": {"sliding_window": None, "layer_types": [FULL] * 4, "rope_parameters": LLAMA3},
    "exaone4 with windows": {
        "model_type": "exaone4",
        "sliding_window": 17,
        "layer_types": TYPES,
        "rope_parameters": LLAMA3,
    },
    "seed_oss": {"attention_bias": True},
    "hunyuan-dense": {
        "model_type": "hunyuan_v1_dense",
        "rope_parameters": {
            "rope_type": "dynamic",
            "rope_theta": 10_000.0,
            "alpha": 50.0,
            "factor": 1.0,
        },
    },
    "ernie4_5": {},
}


def make_model(case):
    """Return transformers' model of a case; all weights are random, those of norms included."""
    changes = dict(CASES[case])
    model_type = changes.pop("model_type", case.split()[0])
    config = AutoConfig.for_model(model_type, **{**SIZES, **changes})
    config._attn_implementation = "eager"  # the others leave out soft caps
    model = random_model(config, seed=len(case))
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(random.Random(name).uniform(0.5, 1.5))
    if "num_experts_per_tok" in changes:
        model.set_experts_implementation("eager")
    return model


def architecture_of(case):
    """Return llama.cpp's name: Olmo 3 is an Olmo 2 with windows."""
    return case.split()[0].replace("olmo3", "olmo2")


def test_all_architectures_are_here():
    tested = {case.split()[0] for case in CASES}
    assert {*FAMILIES} - {"llama", "qwen2", "qwen3"} == tested - {"olmo3"}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_transformers(case, tmp_path):
    model = make_model(case)
    file = convert(model, tmp_path / "model.gguf", architecture_of(case))
    assert_logits_agree(model, file, case)
