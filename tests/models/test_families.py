"""Each family beside transformers' own class: logits, greedy tokens, batching, windows, hits."""

import dataclasses
import os
import random

import pytest
from transformers import AutoConfig

from nanovllm import SamplingParams
from nanovllm.scheduler.windows import pages_for
from tests.checkpoints import random_model
from tests.models.test_decoder import (
    MAX_LENGTH,
    assert_logits_agree,
    assert_tokens_are_greedy,
    random_prompts,
)

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LONG = {"rope_type": "longrope", "partial_rotary_factor": 0.75, "rope_theta": 10_000.0}
BY_TYPE = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
}
WINDOWS = [5, 16, 17, 40, 1000]
"""Shorter and longer than the blocks and the prompts."""
TYPES = [
    None,
    ["full_attention", "sliding_attention"] * 3,
    ["sliding_attention"] * 2 + ["full_attention"] * 4,
]
SWITCHES = {
    "mistral": {"sliding_window": [None, *WINDOWS]},
    "ministral3": {
        "rope": [
            {**YARN, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": original}
            for original in (16, 33, 1024)
        ],
        "mscale": [None, (1.0, 1.0), (0.8, 0.4)],
    },
    "phi3": {"sliding_window": [None, *WINDOWS], "rope": [{}, LONG, LONG], "long": [False, True]},
    "smollm3": {
        "no_rope_layer_interval": [4, 2],
        "no_rope_layers": [None, [0, 1, 1, 0, 1, 1]],
        "use_sliding_window": [False, True],
        "sliding_window": WINDOWS,
        "attention_bias": [False, True],
        "mlp_bias": [True, False],
    },
    "granite": {
        "embedding_multiplier": [1.0, 12.0],
        "attention_multiplier": [0.1, 1.0],
        "residual_multiplier": [0.22, 1.0, 0.5],
        "logits_scaling": [8.0, 1.0],
        "attention_bias": [True, False],
        "mlp_bias": [False, True],
        "rope": [{}, LLAMA3],
    },
    "olmo2": {"attention_bias": [False, True], "rope": [{}, YARN]},
    "olmo3": {
        "sliding_window": WINDOWS,
        "layer_types": TYPES,
        "attention_bias": [False, True],
        "typed_rope": [None, BY_TYPE],
    },
    "gemma2": {
        "sliding_window": WINDOWS,
        "layer_types": TYPES,
        "attn_logit_softcapping": [5.0, None, 50.0],
        "final_logit_softcapping": [10.0, None],
        "query_pre_attn_scalar": [24, 100],
        "attention_bias": [True, False],
    },
    "gemma3_text": {
        "sliding_window": WINDOWS,
        "layer_types": TYPES,
        "final_logit_softcapping": [None, 10.0],
        "query_pre_attn_scalar": [24, 100],
        "typed_rope": [None, BY_TYPE],
    },
    "gemma4_text": {
        "sliding_window": WINDOWS,
        "layer_types": [None, ["sliding_attention", "full_attention"] * 3],
        "global_head_dim": [32, 8],
        "shared": [0, 2],
        "hidden_size_per_layer_input": [0, 12],
        "attention_k_eq_v": [False, True],
        "num_global_key_value_heads": [None, 1],
        "use_double_wide_mlp": [True, False],
        "final_logit_softcapping": [5.0, None],
    },
    "exaone4": {"sliding_window": [*WINDOWS, None], "layer_types": TYPES},
    "seed_oss": {
        "attention_bias": [True, False],
        "attention_out_bias": [True, False, False],
        "mlp_bias": [False, True],
    },
    "hunyuan_v1_dense": {
        "attention_bias": [False, True],
        "rope": [{}, {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}],
    },
    "ernie4_5": {"use_bias": [True, False], "rope": [{}, LLAMA3]},
}
"""By transformers' model type: the values of each switch."""
NUM_CASES = int(os.environ.get("FAMILY_CASES", "3"))
"""Of each family. Twelve have each switch both ways, with several of the others."""
CASES = [f"{family} {number}" for family in SWITCHES for number in range(NUM_CASES)]


def make_config(case):
    """Return the configuration of a case; its sizes are random, and each switch has its turn."""
    family, number = case.split()
    chooser, number = random.Random(case), int(number)
    switches = {}
    for place, (name, values) in enumerate(SWITCHES[family].items()):
        # The stride is odd, so that switches of equally many values do not go together.
        switches[name] = values[(number // (1 + place % 3) + place) % len(values)]
    group, kv_heads = [1, 2, 8][number % 3], chooser.choice([1, 2])
    num_heads = group * kv_heads
    settings = {
        "vocab_size": chooser.choice([500, 503]),
        "hidden_size": chooser.choice([48, 64]),
        "intermediate_size": chooser.choice([48, 77]),
        "num_hidden_layers": 6 if {"layer_types", "shared"} & switches.keys() else 4,
        "num_attention_heads": num_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": chooser.choice([16, 24]),
        "max_position_embeddings": 4096,
        "tie_word_embeddings": chooser.random() < 0.5,
        "rms_norm_eps": chooser.choice([1e-6, 1e-3]),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if family in ("smollm3", "phi3", "granite", "olmo2", "olmo3", "exaone4", "hunyuan_v1_dense"):
        settings["hidden_size"] = num_heads * 8
        settings["head_dim"] = 8 if family in ("phi3", "exaone4", "olmo2", "olmo3") else 16
    return AutoConfig.for_model(family, **settings, **in_transformers_names(switches, settings))


def in_transformers_names(switches, settings):
    """Return the switches as fields of a configuration."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0, **switches.pop("rope", {})}
    if (mscales := switches.pop("mscale", None)) is not None:
        rope["mscale"], rope["mscale_all_dim"] = mscales
    if rope["rope_type"] == "longrope":
        pairs = int(settings["head_dim"] * rope["partial_rotary_factor"]) // 2
        rope["short_factor"] = [1.0 + 0.1 * pair for pair in range(pairs)]
        rope["long_factor"] = [2.0 + 0.3 * pair for pair in range(pairs)]
    original = 2 if switches.pop("long", False) else 2048  # shorter texts have other angles there
    if rope["rope_type"] == "longrope":
        switches["original_max_position_embeddings"] = original
    if (shared := switches.pop("shared", None)) is not None:
        switches["num_kv_shared_layers"] = shared
        if shared:  # transformers fails without the other two
            switches["layer_types"] = ["sliding_attention", "full_attention"] * 3
            switches["hidden_size_per_layer_input"] = 12
        if switches["hidden_size_per_layer_input"]:
            switches["vocab_size_per_layer_input"] = settings["vocab_size"]
    if switches.get("sliding_window", 0) is None and "layer_types" in switches:
        switches["layer_types"] = ["full_attention"] * 6
    if "typed_rope" in switches:
        if (typed := switches.pop("typed_rope")) is not None:
            switches["rope_parameters"] = typed
    elif "global_head_dim" not in switches:
        switches["rope_parameters"] = rope
    return switches


def make_model(case):
    """Return transformers' model of a case. All weights are random, those of norms included."""
    config = make_config(case)
    config._attn_implementation = "eager"  # the others leave out soft caps
    model = random_model(config, seed=len(case))
    for name, weight in model.named_parameters():
        if case.startswith("gemma4") and name.endswith("q_norm.weight"):
            weight.data *= 0.3  # its scores have no other scale: rounding errors would grow
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(random.Random(name).uniform(0.5, 1.5))
    return model


@pytest.fixture(scope="module", params=CASES)
def saved(request, tmp_path_factory):
    """The name of each case, the model of transformers and the directory where it is saved."""
    model, path = make_model(request.param), tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return request.param, model, path


def test_logits_of_all_positions(saved):
    case, theirs, path = saved
    assert_logits_agree(theirs, path, case)


def test_greedy_tokens(saved, make_llm):
    """64 tokens behind each of three prompts: batched, in chunks, preempted, and from a hit."""
    case, theirs, path = saved
    prompts = random_prompts(case, theirs.config.vocab_size, [3, 17, 60])
    chunk = 1 if int(case.split()[1]) % 6 == 0 else 24
    options = {"device": "cpu", "max_model_len": MAX_LENGTH, "kvcache_block_size": 16}
    options["max_num_batched_tokens"] = chunk
    llm = make_llm(path, num_kvcache_blocks=200, **options)
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert_tokens_are_greedy(theirs, prompts, outputs)

    longer = prompts[2] + outputs[2].token_ids[:40]
    [hit] = llm.generate([longer], dataclasses.replace(params, max_tokens=20), use_tqdm=False)
    assert hit.token_ids == outputs[2].token_ids[40:60]
    assert hit.num_cached_tokens >= 80

    smallest = pages_for(MAX_LENGTH, 16, llm.engine.worker_info.windows, chunk)
    llm = make_llm(path, num_kvcache_blocks=smallest + 1, **options)
    again = llm.generate(prompts, params, use_tqdm=False)
    assert [output.token_ids for output in again] == [output.token_ids for output in outputs]
    if chunk > 1 and not llm.engine.worker_info.windows:
        assert llm.engine.scheduler.stats.num_preemptions
