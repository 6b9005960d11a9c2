"""Logits and greedy tokens of random small models of each family against transformers."""

import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.checkpoints import random_model
from tests.models.comparison import (  # noqa: F401
    assert_logits_agree,
    check_answers,
    random_prompts,
    runs,
    saved_models,
    test_logits_of_all_positions,
)

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "factor": 3.0}
QWEN3 = {
    "untied head": {"tie_word_embeddings": False},
    "tied head": {"tie_word_embeddings": True, "attention_bias": True},
    "head_dim above hidden/heads": {"hidden_size": 48, "group": 2, "kv_heads": 2, "head_dim": 64},
    "head_dim below hidden/heads": {"hidden_size": 96, "group": 2, "kv_heads": 2, "head_dim": 6},
    "group of 8": {"group": 8, "kv_heads": 1},
    "yarn": {"rope": YARN},
    "yarn factor 40": {"rope": {**YARN, "factor": 40.0}},
    "yarn attention_factor": {"rope": {**YARN, "attention_factor": 1.6}},
    "yarn beta_fast": {"rope": {**YARN, "beta_fast": 4}, "head_dim": 64},
    "yarn beta_slow": {"rope": {**YARN, "beta_slow": 3, "factor": 8.0}},
    "yarn mscale": {"rope": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}},
    "yarn not truncated": {"rope": {**YARN, "truncate": False}},
    "linear scaling": {"rope": {**LINEAR, "rope_theta": 1e7}},
    "odd sizes": {"vocab_size": 1003, "intermediate_size": 77, "num_hidden_layers": 4},
}
LLAMA = {
    "all biases and tied head": {
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "mlp biases": {"mlp_bias": True, "attention_bias": False},
    "head_dim from hidden/heads": {"hidden_size": 96, "group": 3, "kv_heads": 2, "head_dim": None},
    "llama3": {"rope": LLAMA3},
    "llama3 low and high factors": {
        "rope": {**LLAMA3, "low_freq_factor": 0.5, "high_freq_factor": 9.0, "rope_theta": 5e5},
        "head_dim": 64,
    },
    "SmolLM2": {"group": 3, "kv_heads": 3, "rope": {"rope_type": "default", "rope_theta": 1e5}},
}
QWEN2 = {
    "tied head": {"tie_word_embeddings": True},
    "group of 7": {"group": 7, "kv_heads": 2, "tie_word_embeddings": False},
    "large theta": {"rope": {"rope_type": "default", "rope_theta": 1e6}},
    "windows that are off": {"use_sliding_window": False, "sliding_window": 8},
}
CASES = {
    f"{model_type} {name}": (model_type, settings)
    for model_type, cases in {"qwen3": QWEN3, "llama": LLAMA, "qwen2": QWEN2}.items()
    for name, settings in cases.items()
}


def make_config(case):
    """Return the configuration of a case. Sizes that the case does not set are random."""
    model_type, changes = CASES[case]
    chooser = random.Random(case)
    settings = {
        "group": chooser.choice([1, 2, 4]),
        "kv_heads": chooser.choice([1, 2, 3]),
        "head_dim": chooser.choice([16, 18, 32, 40]),
        "hidden_size": chooser.choice([32, 56, 90]),
        "intermediate_size": chooser.choice([48, 77, 130]),
        "num_hidden_layers": chooser.choice([1, 2, 3]),
        "vocab_size": chooser.choice([500, 512, 1003]),
        "attention_bias": chooser.random() < 0.3,
        "tie_word_embeddings": chooser.random() < 0.5,
        "rope": {"rope_type": "default"},
        **changes,
    }
    rope = {"rope_theta": 10_000.0, **settings.pop("rope")}
    kv_heads = settings.pop("kv_heads")
    num_heads = settings.pop("group") * kv_heads
    if settings["head_dim"] is None:
        del settings["head_dim"]
    if model_type == "llama":  # transformers demands it, whatever head_dim is
        settings["hidden_size"] = -(-settings["hidden_size"] // num_heads) * num_heads
    return AutoConfig.for_model(
        model_type,
        num_attention_heads=num_heads,
        num_key_value_heads=kv_heads,
        rope_parameters=rope,
        rms_norm_eps=chooser.choice([1e-6, 1e-3]),
        max_position_embeddings=4096,
        **settings,
    )


def make_model(case):
    """Return a model of transformers. All weights are random, norms and biases included."""
    return random_model(make_config(case), seed=len(case))


saved = saved_models(make_model, CASES)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("saved", "chunk"), runs(CASES, every=4), indirect=["saved"])
def test_greedy_tokens(saved, chunk, make_llm):
    check_answers(saved, chunk, make_llm)


def test_a_tied_model_with_a_trained_head(tmp_path):
    """Fine-tunes save such: config.json still says that the head is the embedding."""
    random_model(make_config("qwen3 tied head")).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    file = tmp_path / "model.safetensors"
    save_file({**tensors, "lm_head.weight": head}, file, metadata={"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(theirs.lm_head.weight, head)
    assert_logits_agree(theirs, tmp_path, "trained head")


@pytest.mark.parametrize(
    "case", ["qwen3 yarn mscale", "qwen3 linear scaling", "llama llama3", "qwen2 large theta"]
)
def test_config_in_the_style_of_transformers_4(case, tmp_path):
    model = make_model(case)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    config["rope_scaling"] = None if rope["type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_logits_agree(model, tmp_path, case)


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("qwen3 yarn mscale", {"factor": 2.0}),
        ("qwen3 yarn mscale", {"beta_fast": 4}),
        ("qwen3 yarn mscale", {"beta_slow": 3}),
        ("qwen3 yarn mscale", {"truncate": False}),
        ("qwen3 yarn mscale", {"mscale": 0.5}),
        ("llama llama3", {"factor": 2.0}),
        ("llama llama3", {"low_freq_factor": 0.5}),
        ("llama llama3", {"high_freq_factor": 9.0}),
        ("llama llama3", {"original_max_position_embeddings": 128}),
    ],
    ids=str,
)
def test_ignoring_a_rope_setting_would_fail_the_comparison(case, change):
    """Each setting changes transformers' logits by ten times the tolerance used above."""
    plain, config = make_model(case), make_config(case)
    config.rope_parameters.update(change)
    changed = AutoModelForCausalLM.from_config(config).eval()
    changed.load_state_dict(plain.state_dict())
    ids = torch.tensor(random_prompts("ids", config.vocab_size, [120]))
    with torch.inference_mode():
        logits = plain(ids).logits
        assert (changed(ids).logits - logits).abs().max() > 1e-3 * logits.abs().max()
