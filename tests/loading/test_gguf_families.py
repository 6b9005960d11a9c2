"""GGUF files of each architecture beside transformers' model with the same weights."""

import functools
import random
from pathlib import Path

import gguf as llama_cpp
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nanovllm import SamplingParams
from nanovllm.errors import CheckpointError
from nanovllm.features.quantization.gguf import QuantizedBlocks
from nanovllm.layers.experts import StackedLinear
from nanovllm.layers.pieces import HeadLinear, TensorRows
from nanovllm.loading import gguf
from nanovllm.loading.gguf import read_gguf, read_rows
from nanovllm.loading.gguf_families import FAMILIES
from nanovllm.loading.gguf_family import Order, Reading, rotary_pairs
from nanovllm.loading.hub import open_checkpoint
from nanovllm.options.config import Config
from nanovllm.parallel.rank_setup import check_network
from nanovllm.utils import distributed
from tests.checkpoints import random_model
from tests.gguf_converter import convert, tiled
from tests.gguf_files import to_llama_order
from tests.models.comparison import assert_logits_agree

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
LINEAR, CONV = "linear_attention", "conv"
TYPES = [SLIDING, SLIDING, SLIDING, FULL]
DELTA = {
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
}
EXPERTS = {"num_experts_per_tok": 2, "tie_word_embeddings": False}
GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
ROUTED = {**EXPERTS, "moe_intermediate_size": 24}
PART = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
LATENT = {
    **EXPERTS,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
NEMOTRON = {
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 8,
    "time_step_min": 1e-9,  # transformers takes it in place of time_step_limit
    "tie_word_embeddings": False,
}
FALCON = {
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
    "mamba_d_ssm": 48,
    "mamba_n_heads": 6,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "attention_in_multiplier": 0.9,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.1,
    "ssm_out_multiplier": 0.7,
    "key_multiplier": 0.6,
    "mlp_multipliers": [0.9, 1.2],
    "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
    "lm_head_multiplier": 0.5,
    "embedding_multiplier": 1.5,
}
GRANITE_4 = {
    "layer_types": ["attention"] * 4,
    "position_embedding_type": "rope",
    "mamba_n_heads": 4,
}
STATES = {
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "position_embedding_type": None,
    "mamba_d_state": 8,
}
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
    "granite": {**GRANITE, "attention_bias": True, "mlp_bias": True},
    "granite of the class of Granite 4": {
        "model_type": "granitemoehybrid",
        **GRANITE,
        **GRANITE_4,
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
    },
    "granitehybrid": {
        "model_type": "granitemoehybrid",
        **GRANITE,
        **GRANITE_4,
        **STATES,
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
    },
    "granitehybrid with experts": {
        "model_type": "granitemoehybrid",
        **GRANITE,
        **GRANITE_4,
        **STATES,
        "num_local_experts": 5,
        "shared_intermediate_size": 40,
        **EXPERTS,
    },
    "granitemoe": {
        "model_type": "granitemoehybrid",
        **GRANITE,
        **GRANITE_4,
        "num_local_experts": 5,
        "shared_intermediate_size": 40,
        **EXPERTS,
    },
    "falcon-h1": {"model_type": "falcon_h1", **FALCON, "tie_word_embeddings": False},
    "falcon-h1 with a norm": {
        "model_type": "falcon_h1",
        **FALCON,
        "tie_word_embeddings": False,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
    },
    "command-r": {"model_type": "cohere", "logit_scale": 0.3, "tie_word_embeddings": True},
    "cohere2": {"sliding_window": 17, "logit_scale": 0.3, "tie_word_embeddings": True},
    "deepseek2": {
        "model_type": "deepseek_v3",
        **LATENT,
        "n_group": 3,
        "topk_group": 2,
        "n_routed_experts": 6,
        "norm_topk_prob": True,
        "rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.8},
    },
    "deepseek2 with a softmax": {
        "model_type": "deepseek_v2",
        **LATENT,
        "q_lora_rank": None,
        "n_routed_experts": 5,
    },
    "deepseek2 of GLM-4.7-Flash": {
        "model_type": "glm4_moe_lite",
        **LATENT,
        "n_routed_experts": 5,
        "rms_norm_eps": 1e-5,
    },
    "minicpm3": {**LATENT, "v_head_dim": 16, "tie_word_embeddings": True},
    "nemotron_h": {"layers_block_type": [LINEAR, "mlp", FULL, LINEAR], **NEMOTRON},
    "nemotron_h_moe": {
        "model_type": "nemotron_h",
        "layers_block_type": [LINEAR, "moe", FULL, "moe"],
        **NEMOTRON,
        **EXPERTS,
        "n_routed_experts": 5,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 40,
        "routed_scaling_factor": 2.5,
    },
    "glm4moe": {
        "model_type": "glm4_moe",
        **ROUTED,
        "rope_parameters": PART,
        "n_routed_experts": 5,
        "n_shared_experts": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": True,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    "ernie4_5-moe": {
        "model_type": "ernie4_5_moe",
        **ROUTED,
        "moe_num_experts": 5,
        "moe_k": 2,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 3,
    },
    "afmoe": {
        **ROUTED,
        "num_experts": 5,
        "num_shared_experts": 1,
        "num_dense_layers": 1,
        "sliding_window": 17,
        "route_scale": 1.5,
        "mup_enabled": True,
    },
    "minimax-m2": {
        "model_type": "minimax_m2",
        **EXPERTS,
        "num_local_experts": 5,
        "rope_parameters": PART,
    },
    "mellum": {
        **ROUTED,
        "num_experts": 5,
        "sliding_window": 17,
        "layer_types": TYPES,
        "rope_parameters": {FULL: YARN, SLIDING: {"rope_type": "default", "rope_theta": 5e3}},
    },
    "laguna": {
        **ROUTED,
        "num_experts": 5,
        "sliding_window": 17,
        "layer_types": [FULL, SLIDING, SLIDING, SLIDING],
        "num_attention_heads_per_layer": [4, 6, 6, 6],
        "shared_expert_intermediate_size": 40,
        "moe_routed_scaling_factor": 1.5,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "rope_parameters": {
            FULL: {**YARN, "partial_rotary_factor": 0.5},
            SLIDING: {"rope_type": "default", "rope_theta": 5e3},
        },
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
    "qwen35": {"model_type": "qwen3_5_text", "rms_norm_eps": 1e-5, **DELTA},
    "qwen35 with two value heads a key head": {
        "model_type": "qwen3_5_text",
        **DELTA,
        "linear_num_value_heads": 6,
        "layer_types": [LINEAR, FULL, LINEAR, LINEAR],
        "tie_word_embeddings": True,
    },
    "qwen35moe": {
        "model_type": "qwen3_5_moe_text",
        **DELTA,
        "linear_num_value_heads": 12,
        "num_hidden_layers": 2,  # more would amplify float32's errors, also transformers' own
        "layer_types": [LINEAR, FULL],
        "num_experts": 5,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        **EXPERTS,
    },
    "lfm2": {"block_auto_adjust_ff_dim": False, "layer_types": [CONV, FULL, CONV, CONV]},
    "lfm2moe": {
        "model_type": "lfm2_moe",
        "layer_types": [CONV, FULL, CONV, CONV],
        "num_dense_layers": 1,
        "num_experts": 5,
        "moe_intermediate_size": 24,
        **EXPERTS,
        "tie_word_embeddings": True,
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


def make_model(case, **others):
    """Return transformers' model of a case; all weights are random, those of norms included."""
    changes = {**CASES[case], **others}
    model_type = changes.pop("model_type", case.split()[0])
    config = AutoConfig.for_model(model_type, **{**SIZES, **changes})
    config._attn_implementation = "eager"  # the others leave out soft caps
    model = random_model(config, seed=len(case))
    for name, weight in model.named_parameters():
        if name.endswith("mixer.norm.weight"):
            weight.data *= 0.3  # what it normalises may be small: rounding errors would grow
        elif name.endswith("mixer.A_log"):
            weight.data -= 3.0  # transformers sums logarithms of decays: small ones
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(random.Random(name).uniform(0.5, 1.5))
        elif name.endswith(("expert_bias", "e_score_correction_bias")):
            buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(5)))
    if "num_experts_per_tok" in changes:
        model.set_experts_implementation("eager")
    return model


def architecture_of(case):
    """Return llama.cpp's name: Olmo 3 is an Olmo 2 with windows."""
    return case.split()[0].replace("olmo3", "olmo2")


TILED = "qwen35 with two value heads a key head"


def test_all_architectures_are_here():
    tested = {case.split()[0] for case in CASES}
    see = {"qwen2vl", "qwen3vl", "qwen3vlmoe"}  # tests/vision/test_mmproj.py has them
    assert {*FAMILIES} - {"llama", "qwen2", "qwen3"} - see == tested - {"olmo3"}


models = functools.cache(make_model)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_transformers(case, tmp_path):
    model = models(case)
    file = convert(model, tmp_path / "model.gguf", architecture_of(case))
    assert_logits_agree(model, file, case)


SHORT = {"max_model_len": 64, "num_kvcache_blocks": 64, "kvcache_block_size": 16}


def assert_near(llm, exact, distance):
    """Two engines give the likeliest tokens nearly the same log-probabilities."""
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=20)
    first, second = (
        each.generate([[5, 6, 7, 8]], params, use_tqdm=False)[0].outputs[0].logprobs[0]
        for each in (llm, exact)
    )
    common = first.keys() & second.keys()
    assert len(common) > 10
    assert all(abs(first[token].logprob - second[token].logprob) < distance for token in common)


@pytest.mark.parametrize(("kind", "stays"), [("Q8_0", True), ("Q4_0", True), ("MXFP4", False)])
def test_experts_of_few_bits(make_llm, tmp_path, kind, stays):
    """Each expert is a matrix of its own in the file; its numbers are exact in float32."""
    sizes = {"num_hidden_layers": 1, "intermediate_size": 64, "num_local_experts": 3}
    config = AutoConfig.for_model("gpt_oss", **{**SIZES, **sizes, **EXPERTS})
    file = convert(random_model(config), tmp_path / "model.gguf", "gpt-oss", kind=kind)
    llm = make_llm(file, **SHORT)
    model = llm.engine.executor._runner.network.model
    found = {module.quantized.block_type for _, module in experts_of(model) if module.quantized}
    assert found == ({kind} if stays else set())
    assert_near(llm, make_llm(file, dtype="float32", **SHORT), 0.25)


@pytest.mark.parametrize(
    ("kind", "value_dim", "stays"), [("Q8_0", 32, True), ("Q4_0", 64, True), ("Q8_0", 16, False)]
)
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_layers_with_state_of_few_bits(make_llm, tmp_path, kind, value_dim, stays, quantization):
    """Value heads that are whole blocks leave the output's weight in its bits; the gates, which are
    small and sensitive, are converted. The numbers are exact in float32.
    """
    file = convert_qwen35(tmp_path, value_dim, kind=kind)
    llm = make_llm(file, quantization=quantization, **SHORT)
    mixer = llm.engine.executor._runner.network.model.model.layers[0].self_attn
    assert mixer.in_proj_qkv.quantized.block_type == kind
    assert isinstance(mixer.out_proj.quantized, QuantizedBlocks) == stays
    assert mixer.in_proj_ab.quantized is None
    few_bits = {type(mixer.in_proj_qkv.method)}
    if stays or quantization:
        few_bits.add(type(mixer.out_proj.method))
    assert len(few_bits) == 1
    assert type(mixer.in_proj_ab.method) not in few_bits
    assert_near(llm, make_llm(file, dtype="float32", **SHORT), 0.5)


ORDERS = [  # number of rows, the order, and how the converter makes it
    (24, rotary_pairs(3), lambda rows: to_llama_order(rows, 3)),
    (24, Order(2, 3), lambda rows: tiled(rows, 2, 4, 3)),
    (24, Order(4), lambda rows: tiled(rows, 4, 6, 1)),
    (30, Order(4, 3, start=6), lambda rows: torch.cat([rows[:6], tiled(rows[6:], 4, 2, 3)])),
    (12, Order(1, 4), lambda rows: rows),
]


@pytest.mark.parametrize(("count", "order", "change"), ORDERS)
def test_orders(count, order, change):
    rows = torch.arange(count)[:, None]
    stored = change(rows)
    assert torch.equal(stored[order.indices(count)], rows)
    assert not order.misfit(count)


@pytest.mark.parametrize("count", [0, 6, 7, 17, 19])
def test_what_fits_no_order(count):
    assert Order(2, 3, start=6).misfit(count) == "must have 6 and a multiple of 6"


def test_orders_of_blocks():
    order = Order(2, 64, start=128)
    numbers = order.indices(128 + 6 * 64).reshape(-1, 32)
    blocks = order.of_blocks(32)
    assert np.array_equal(numbers[:, 0] // 32, blocks.indices(len(numbers)))
    assert order.of_blocks(128) is None
    assert order._replace(start=16).of_blocks(32) is None
    assert Reading(columns=order).moves_whole_blocks(64)
    assert not Reading(columns=order).moves_whole_blocks(256)
    assert not Reading(offset=1.0).moves_whole_blocks(32)


def test_numbers_and_rows_are_transformers(tmp_path):
    file = Path(convert(models(TILED), tmp_path / "model.gguf", "qwen35"))
    weights = read_gguf(file).weights
    for name, tensor in models(TILED).state_dict().items():
        if name == "lm_head.weight":
            continue  # tied
        found = read_rows(file, weights[name], slice(None), raw=False)
        assert found.shape == tensor.shape, name
        close = 1e-6 if "norm" in name or name.endswith("A_log") else 0
        assert np.allclose(found, tensor, rtol=close, atol=close), name
        some = slice(1, 3)
        assert np.array_equal(read_rows(file, weights[name], some, raw=False), found[some]), name


@pytest.mark.parametrize("case", [TILED, "qwen35moe", "lfm2"])
def test_transformers_reads_the_file_alike(case, tmp_path):
    """So what the test's converter writes is what llama.cpp's does."""
    metadata = {"tokenizer.ggml.tokens": [f"t{index}" for index in range(301)]}
    types = {} if case == "lfm2" else {"num_hidden_layers": 4, "layer_types": None}
    model = make_model(case, **types)
    file = convert(model, tmp_path / "m.gguf", architecture_of(case), metadata=metadata)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    found = read.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.allclose(found[name], tensor, rtol=1e-6, atol=1e-6), name
    own = {"linear_", "layer_types", "conv_L", "norm_eps", "num_hidden", "num_dense", "tie_word"}
    for key, value in open_checkpoint(file).config.items():
        if any(part in key for part in own) and hasattr(read.config, key):
            assert getattr(read.config, key) == pytest.approx(value), key


def convert_qwen35(path, value_dim=32, **options):
    """Write a Qwen3.5 with a layer with state and one with attention."""
    sizes = {**SIZES, **DELTA, "linear_num_value_heads": 6, "linear_value_head_dim": value_dim}
    sizes |= {"num_hidden_layers": 2, "layer_types": [LINEAR, FULL], "tie_word_embeddings": False}
    config = AutoConfig.for_model("qwen3_5_text", **sizes)
    return Path(convert(random_model(config), path / "model.gguf", "qwen35", **options))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_value_heads_move_as_whole_blocks(kind, tmp_path):
    """Of heads of 32, as of those of 128: the columns of ssm_out, and rows of others."""
    file = convert_qwen35(tmp_path, kind=kind)
    weight = read_gguf(file).weights["model.layers.0.linear_attn.out_proj.weight"]
    assert weight.tensor.type.name == kind
    assert weight.has_blocks
    exact = read_rows(file, weight, slice(None), raw=False)
    blocks = read_rows(file, weight, slice(None), raw=True)
    found = llama_cpp.dequantize(blocks, llama_cpp.GGMLQuantizationType[kind])
    assert np.array_equal(found, exact)
    assert np.array_equal(read_rows(file, weight, slice(5, 9), raw=True), blocks[5:9])


def test_heads_that_cut_blocks(tmp_path):
    file = convert_qwen35(tmp_path, 16, kind="Q8_0")
    weight = read_gguf(file).weights["model.layers.0.linear_attn.out_proj.weight"]
    assert not weight.has_blocks
    assert read_rows(file, weight, slice(None), raw=False).shape == (64, 96)


def test_the_layer_that_drafts(tmp_path):
    """It is the last block of the file, with names of its own, and no layer of the model."""
    shapes = {
        "nextn.eh_proj.weight": (64, 128),
        "nextn.enorm.weight": (64,),
        "nextn.hnorm.weight": (64,),
        "nextn.shared_head_norm.weight": (64,),
        "attn_norm.weight": (64,),
        "attn_q.weight": (128, 64),
    }
    extra = {f"blk.2.{name}": torch.full(shape, 1.5) for name, shape in shapes.items()}
    types = [True, False, False]
    metadata = {"block_count": 3, "nextn_predict_layers": 1, "attention.recurrent_layers": types}
    file = convert_qwen35(tmp_path, metadata=metadata, extra=extra)
    config, weights = open_checkpoint(str(file)).config, read_gguf(file).weights
    assert config["num_hidden_layers"] == len(config["layer_types"]) == 2
    drafting = {name for name in weights if name.startswith("mtp.")}
    assert drafting == {
        "mtp.fc.weight",
        "mtp.pre_fc_norm_embedding.weight",
        "mtp.pre_fc_norm_hidden.weight",
        "mtp.norm.weight",
        "mtp.layers.0.input_layernorm.weight",
        "mtp.layers.0.self_attn.q_proj.weight",
    }
    for name in drafting:
        found = read_rows(file, weights[name], slice(None), raw=False)
        assert (found == (0.5 if "norm" in name else 1.5)).all(), name


@pytest.mark.parametrize(
    ("interval", "types"), [(None, "lllf"), (2, "lflf"), (3, "llfl"), (1, "ffff")]
)
def test_types_of_layers_without_a_list(interval, types, tmp_path):
    metadata = {"attention.recurrent_layers": None, "full_attention_interval": interval}
    file = convert(models("qwen35"), tmp_path / "x.gguf", "qwen35", metadata=metadata)
    names = {"l": "linear_attention", "f": "full_attention"}
    assert open_checkpoint(file).config["layer_types"] == [names[kind] for kind in types]


def experts_of(model):
    return [(p, m) for p, m in model.named_modules() if isinstance(m, StackedLinear)]


@pytest.mark.parametrize(
    ("case", "metadata", "shapes", "said"),
    [
        ("gemma3", {"attention.sliding_window_pattern": [True]}, {}, r"a list of 7 bool"),
        ("gemma3", {"attention.sliding_window_pattern": [1] * 7}, {}, r"a list of 7 bool"),
        (
            "gemma3",
            {"attention.sliding_window": 2**24 + 1},
            {},
            r"sliding_window must be an integer",
        ),
        ("gemma3", {"rope.freq_base_swa": float("nan")}, {}, r"rope\.freq_base_swa must be"),
        ("gemma3", {"attention.key_length_swa": 8}, {}, r"gemma3\.attention\.key_length_swa 8 is"),
        ("gemma3", {}, {"blk.1.post_ffw_norm.weight": (65,)}, r"misshapen .*post_feedforward"),
        ("gemma4", {"attention.key_length_swa": None}, {}, r"key_length_swa must be an integer"),
        ("gemma4", {"attention.sliding_window_pattern": None}, {}, r"pattern must be a list"),
        ("gemma4", {"feed_forward_length": [96] * 5}, {}, r"feed_forward_length must be a list"),
        ("gemma4", {"feed_forward_length": [96, 8] * 3}, {}, r"feed_forward_length .* not supp"),
        ("gemma4", {"attention.head_count_kv": [1, 1, 2, 1, 1, 1]}, {}, r"equally many"),
        ("gemma4", {"attention.shared_kv_layers": 7}, {}, r"shared_kv_layers must be an integer"),
        ("gemma4", {"expert_count": 4}, {}, r"gemma4\.expert_count 4 is not supported"),
        ("gemma4", {}, {"rope_freqs.weight": (16,)}, r"rope_freqs\.weight .* 16 factors"),
        ("gemma4", {}, {"rope_freqs.weight": (2, 8)}, r"rope_freqs\.weight .* one dimension"),
        ("granite", {"rope.scaling.finetuned": False}, {}, r"finetuned False is not supported"),
        ("granite", {"logit_scale": 0.0}, {}, r"granite\.logit_scale must be"),
        ("granite", {"attention.head_count_kv": [2, 0, 2, 2]}, {}, r"equally many in all layers"),
        ("granitehybrid", {"ssm.inner_size": 100}, {}, r"inner_size 100 .*multiple of 64"),
        ("granitehybrid", {"attention.head_count_kv": 2}, {}, r"head_count_kv must be a list"),
        ("granitehybrid", {}, {"blk.0.ssm_a": (4, 2)}, r"misshapen .*A_log"),
        ("falcon-h1", {"ssm.time_step_rank": 5}, {}, r"time_step_rank 5 is not supported"),
        ("nemotron_h", {"feed_forward_length": [0, 96, 0, 8]}, {}, r"feed_forward_length .* not"),
        ("nemotron_h", {"rope.scaling.finetuned": True}, {}, r"finetuned True is not supported"),
        ("deepseek2", {"attention.key_length_mla": 8}, {}, r"key_length_mla 8 is not supported"),
        ("deepseek2", {"expert_gating_func": 3}, {}, r"expert_gating_func 3 is not supported"),
        ("deepseek2", {}, {"blk.0.attn_k_b.weight": (3, 24, 12)}, r"each expert or head: 4"),
        ("deepseek2", {}, {"blk.0.attn_v_b.weight": (4, 24, 10)}, r"misshapen .*v_b_proj\.0"),
        ("glm4moe", {"nextn_predict_layers": 4}, {}, r"nextn_predict_layers must be an integer"),
        ("cohere2", {"attention.layer_norm_epsilon": None}, {}, r"layer_norm_rms_epsilon must be"),
        ("mistral3", {"attention.temperature_length": 64}, {}, r"temperature_length 64 is not"),
        ("phi3", {"rope.dimension_count": 18}, {}, r"dimension_count 18 is not supported"),
        ("phi3 with long texts", {}, {"rope_factors_long.weight": (5,)}, r"long_factor must be"),
        ("qwen3moe", {"expert_count": None}, {}, r"expert_count must be an integer"),
        ("qwen3moe", {"expert_count": 2**20}, {}, r"must have one part for each expert"),
        ("qwen3moe", {"expert_used_count": 0}, {}, r"expert_used_count must be an integer"),
        ("qwen3moe", {"expert_gating_func": 2}, {}, r"expert_gating_func 2 is not supported"),
        ("qwen3moe", {}, {"blk.0.ffn_up_exps.weight": (5,)}, r"one part for each expert"),
        ("qwen3moe", {}, {"blk.0.ffn_up_exps.weight": (5, 2, 3, 4)}, r"4 dimensions; 2 and 3"),
        ("qwen3moe", {}, {"blk.0.ffn_up_exps.weight": (5, 24, 63)}, r"misshapen .*experts\.0"),
        ("qwen3moe", {}, {"blk.0.attn_q.weight": (1, 64, 64)}, r"3 dimensions; 1 and 2"),
        ("gpt-oss", {}, {"blk.0.attn_sinks.weight": (5,)}, r"misshapen .*sinks"),
        ("gpt-oss", {}, {"blk.0.ffn_down_exps.bias": (5, 1, 64)}, r"misshapen .*down_proj\.bias"),
        ("olmo2", {}, {"blk.0.attn_q_norm.weight": (16,)}, r"misshapen .*q_norm"),
        ("qwen35", {"nextn_predict_layers": 4}, {}, r"nextn_predict_layers 4 must be below"),
        ("qwen35", {"ssm.group_count": 2}, {}, r"time_step_rank 3 is not .*group_count 2"),
        ("qwen35", {"ssm.inner_size": 100}, {}, r"divides ssm\.inner_size 100"),
        ("qwen35", {"ssm.state_size": 0}, {}, r"ssm\.state_size must be an integer"),
        ("qwen35", {"ssm.conv_kernel": None}, {}, r"ssm\.conv_kernel must be an integer"),
        ("qwen35", {"attention.recurrent_layers": [True]}, {}, r"a list of 4 bool"),
        ("qwen35", {"full_attention_interval": 0, "attention.recurrent_layers": None}, {}, "inter"),
        ("qwen35", {"ssm.dt_b_c_rms": True}, {}, r"dt_b_c_rms True is not supported"),
        ("qwen35", {}, {"blk.0.attn_qkv.weight": (48, 48)}, r"48 rows, must have 48 and a mult"),
        ("qwen35", {}, {"blk.0.ssm_out.weight": (64, 100)}, r"100 columns, must have 0 and"),
        ("qwen35", {}, {"blk.0.ssm_a": (7,)}, r"ssm_a' has 7 rows, must have"),
        ("qwen35moe", {"expert_count": None}, {}, r"expert_count must be an integer"),
        ("qwen35moe", {"expert_gating_func": 2}, {}, r"expert_gating_func 2 is not supported"),
        ("lfm2", {"attention.head_count_kv": 2}, {}, r"head_count_kv must be a list of 4 int"),
        ("lfm2", {"attention.head_count_kv": [0, 2]}, {}, r"head_count_kv must be a list of 4"),
        ("lfm2", {"attention.head_count_kv": [0, 1, 2, 0]}, {}, r"equally many"),
        ("lfm2", {"attention.head_count_kv": [0] * 4}, {}, r"head_count_kv must be an integer"),
        ("lfm2", {"attention.sliding_window": 64}, {}, r"sliding_window 64 is not supported"),
        ("lfm2", {"shortconv.l_cache": None}, {}, r"l_cache must be an integer"),
        ("lfm2moe", {"leading_dense_block_count": 9}, {}, r"leading_dense_block_count must be"),
        ("lfm2moe", {"expert_gating_func": 1}, {}, r"expert_gating_func 1 is not supported"),
    ],
)
def test_what_is_refused(case, metadata, shapes, said, tmp_path):
    """Wrong settings, ranks and shapes end in an error that names the file and them."""
    file = convert(
        models(case), tmp_path / "x.gguf", architecture_of(case), metadata=metadata, shapes=shapes
    )
    with pytest.raises(CheckpointError, match=said) as raised:
        check_network(Config(file), open_checkpoint(file))
    assert file in str(raised.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_its_own_heads_of_latent_attention(rank, monkeypatch):
    """Symptom: the tensors of another rank's heads are unexpected."""
    monkeypatch.setattr(distributed, "_tensor_parallel", distributed.TensorParallel(rank, 2))
    own = range(2 * rank, 2 * rank + 2)
    pieces = [TensorRows("kv_b_proj", 80, 20 * head, 12) for head in own]
    layer = HeadLinear(8, pieces, turned=True)
    layer.is_split = True
    shards = list(layer.shards("self_attn.k_b_proj"))
    assert [each.name for each in shards] == [f"self_attn.k_b_proj.{i}.weight" for i in range(4)]
    assert {each.shape for each in shards} == {(8, 12)}
    rows = [12 * (head in own) for head in range(4)]
    assert [each.target.shape for each in shards] == [(count, 8) for count in rows]


def test_too_many_experts(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf, "_MAX_WEIGHTS", 40)
    file = convert(models("qwen3moe"), tmp_path / "x.gguf", "qwen3moe")
    with pytest.raises(CheckpointError, match=r"more than 40 weights, each expert's counted"):
        open_checkpoint(file)


@pytest.mark.parametrize("case", ["gemma4", "gpt-oss"])
def test_files_that_end_early(case, tmp_path):
    """Wherever it is cut, a file is refused as soon as it is opened."""
    file = Path(convert(models(case), tmp_path / "x.gguf", case))
    content = file.read_bytes()
    for size in random.Random(case).sample(range(len(content) - 64), 40):
        file.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=r"x\.gguf"):
            open_checkpoint(str(file))
