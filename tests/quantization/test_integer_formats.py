"""Checkpoints of integers in their published layouts, beside plain ones of the same numbers.

FORMAT_CASES=1 runs each layout in each family; without it each runs in one of them.
"""

import itertools
import logging
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.checkpoints import copy_checkpoint, make_checkpoint, read_json
from tests.closeness import assert_close
from tests.models.comparison import run_in_chunks
from tests.quantization import quantised
from tests.quantization.integer_cases import CASES, EVERY, FAMILIES, WIDENED, awq, case, gptq

PROMPTS = [[5, 7, 11], random.Random(0).choices(range(1003), k=40)]
LOADER = "nanovllm.worker.model_loader"
HEADS = "widened to bfloat16 because small linears keep their bits"
SOME = ("W4A16 g32 asymmetric", "W8A8 static", "GPTQ desc_act", "AWQ g64")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Paths of float32 models by family."""
    path = tmp_path_factory.mktemp("models")
    return {
        family: make_checkpoint(path / family, family, **{**quantised.SIZES, **sizes})
        for family, sizes in FAMILIES.items()
    }


def pairs():
    """Return the layouts with their families. An early GPTQ file has no bias of its own."""
    with_all = itertools.product(CASES, FAMILIES)
    with_one = zip(CASES, itertools.cycle(FAMILIES))
    found = with_all if EVERY else with_one
    return [pair for pair in found if pair != ("GPTQ 8 bits", "llama")]


def logits(path, dtype="float32"):
    return torch.cat(run_in_chunks(path, PROMPTS, [2, 17], 16, dtype)).float()


def distance(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(("name", "family"), pairs())
def test_logits(name, family, models, tmp_path, caplog):
    """In float32 those of the dequantised weights; in bfloat16 near them, in the kept bits.

    In 8 bits, the distance is that of bfloat16 itself. In 4 bits the inputs are rounded to 8 bits.
    """
    linear, settings = CASES[name]
    stored, plain = quantised.write(models[family], tmp_path, linear, settings)
    expected = logits(plain)
    assert_close(logits(stored), expected, atol=1e-4)
    with caplog.at_level(logging.INFO, LOADER):
        found = logits(stored, "bfloat16")
    bits = settings.get("bits") or settings["config_groups"]["group_0"]["weights"]["num_bits"]
    limit = {8: 0.03, 4: 0.06}[bits]
    if family in ("qwen3_moe", "deepseek_v3"):
        limit = 0.3  # a rounded hidden state may choose another expert
    elif family == "minicpm3":
        limit *= 1.5  # bfloat16 alone is farther away: latents are rounded before each head
    assert distance(found, expected) < limit
    words = "widened to bfloat16 because" if name in WIDENED else f"kept in {bits} bits"
    assert words in caplog.text
    assert ("widened" in caplog.text.replace(HEADS, "")) == (name in WIDENED)


def test_the_logits_of_transformers(models, tmp_path):
    """Which reads the same files with compressed_tensors."""
    linear, settings = CASES["W4A16 g128"]
    stored, _ = quantised.write(models["qwen3"], tmp_path, linear, settings)
    theirs = AutoModelForCausalLM.from_pretrained(stored, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = torch.cat([theirs(torch.tensor([prompt])).logits[0] for prompt in PROMPTS])
    assert_close(logits(stored), expected, atol=1e-4)


def mixed(rules):
    """Return what writes each linear by the first of `rules` whose word is in its name."""

    def linear(name, weight):
        written = next(each for word, each in rules if word in name)
        return None if written is None else written(name, weight)

    return linear


def test_several_groups_and_plain_linears(models, tmp_path):
    int4, int8 = case("pack-quantized", 4, 32), case("int-quantized", 8, None, symmetric=False)
    rules = [("layers.1.mlp", None), ("down_proj", int8[0]), ("", int4[0])]
    every, down = int4[1]["config_groups"]["group_0"], int8[1]["config_groups"]["group_0"]
    settings = {
        **int4[1],
        "format": "mixed-precision",
        "config_groups": {
            "every": {**every, "targets": [r"re:.*self_attn\.(q|k|v|o)_proj$", "re:.*mlp.*"]},
            "down": {**down, "targets": [f"model.layers.{i}.mlp.down_proj" for i in (0, 1)]},
        },
        "ignore": ["re:.*layers.1.mlp.*", "lm_head"],
    }
    stored, plain = quantised.write(models["qwen3"], tmp_path, mixed(rules), settings)
    assert_close(logits(stored), logits(plain), atol=1e-4)


BY_RULE = {
    **gptq(4, 64)[1],
    "dynamic": {
        r"-:.*layers\.0\.mlp\.": {},
        r"+:.*self_attn\.o_proj": {"bits": 8, "group_size": -1},
        "lm_head": {},
    },
}
BLOCKS = [
    ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    ["self_attn.o_proj"],
]
SOME_PLAIN = {
    "GPTQ rules": (
        BY_RULE,
        [("layers.0.mlp", None), ("o_proj", gptq(8, -1)[0]), ("", gptq(4, 64)[0])],
    ),
    "GPTQ modules": (
        {**gptq(4, 128)[1], "modules_in_block_to_quantize": BLOCKS},
        [("self_attn", gptq(4, 128)[0]), ("", None)],
    ),
    "AWQ": (
        {**awq(64)[1], "modules_to_not_convert": ["self_attn", "lm_head"]},
        [("self_attn", None), ("", awq(64)[0])],
    ),
}


@pytest.mark.parametrize("name", SOME_PLAIN)
def test_some_linears_are_plain(name, models, tmp_path):
    settings, rules = SOME_PLAIN[name]
    stored, plain = quantised.write(models["qwen3"], tmp_path, mixed(rules), settings)
    assert_close(logits(stored), logits(plain), atol=1e-4)


@pytest.mark.parametrize("name", ["W4A16 g128", "W8A8", "GPTQ", "AWQ"])
def test_heads_and_embeddings(name, tmp_path):
    sizes = {"vocab_size": 1008, "tie_word_embeddings": False}
    model = make_checkpoint(tmp_path / "model", **quantised.SIZES, **sizes)
    linear, settings = CASES[name]
    changes = {"ignore": ["re:.*_proj$"], "lm_head": True, "modules_to_not_convert": ["_proj"]}
    changes = {key: changes[key] for key in changes.keys() & settings.keys()}
    changed = {**settings, **changes, "dynamic": {r"-:.*_proj$": {}}}
    ends = ("lm_head.weight", "embed_tokens.weight")
    stored, plain = quantised.write(model, tmp_path, linear, changed, ends)
    assert_close(logits(stored), logits(plain), atol=1e-4)


def test_inputs_in_different_orders_are_widened(models, tmp_path, caplog):
    """q, k and v are one product, whose inputs have one order."""

    def linear(name, weight):
        return gptq(4, 32, desc_act="k_proj" in name)[0](name, weight)

    settings = gptq(4, 32, desc_act=True)[1]
    stored, plain = quantised.write(models["qwen3"], tmp_path, linear, settings)
    assert_close(logits(stored), logits(plain), atol=1e-4)
    with caplog.at_level(logging.INFO, LOADER):
        found = logits(stored, "bfloat16")
    assert "6 linears in GPTQ W4A16 g32 desc_act: widened" in caplog.text
    assert distance(found, logits(plain)) < 0.06


def test_dummy_weights(models, tmp_path, make_llm):
    """Which have no files: integers are 0."""
    for name in SOME:
        settings = CASES[name][1]
        path = copy_checkpoint(models["qwen3"], tmp_path / name, quantization_config=settings)
        assert read_json(tmp_path / name / "config.json")["quantization_config"] == settings
        llm = make_llm(path, load_format="dummy", dtype="bfloat16", max_model_len=64)
        llm.generate([[1, 2, 3]], use_tqdm=False)


HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}


@pytest.mark.parametrize("name", ["W4A16 g32 asymmetric", "GPTQ v2 asymmetric", "AWQ g32"])
def test_experts_of_a_hybrid(name, tmp_path):
    """Its mixers and shared experts are plain: each format says so in its own way."""
    sizes = {**quantised.SIZES, **HYBRID}
    model = make_checkpoint(tmp_path / "model", "qwen3_5_moe_text", **sizes)
    linear, settings = {**CASES, "AWQ g32": awq(32)}[name]
    plain_parts = {
        "ignore": ["re:.*linear_attn.*", "re:.*shared_expert.*", "lm_head"],
        "dynamic": {"-:.*linear_attn.*": {}, "-:.*shared_expert.*": {}},
        "modules_to_not_convert": ["linear_attn", "shared_expert"],
    }
    rules = [("linear_attn", None), ("shared_expert", None), ("", linear)]
    settings = {**settings, **plain_parts}
    stored, plain = quantised.write(model, tmp_path, mixed(rules), settings)
    assert_close(logits(stored), logits(plain), atol=1e-4)
