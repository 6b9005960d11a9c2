"""Logits and greedy tokens of random small models of each family against transformers."""

import json
import logging
import random

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from nanovllm import SamplingParams
from nanovllm.errors import CheckpointError
from nanovllm.kernels.cpu.library import library
from nanovllm.models.registry import read_config
from nanovllm.worker.model_loader import check_weights
from tests.checkpoints import random_model, write_json
from tests.models.comparison import (  # noqa: F401
    MAX_LENGTH,
    assert_logits_agree,
    check_answers,
    random_prompts,
    runs,
    saved_models,
    test_logits_of_all_positions,
)
from tests.models.family_cases import LLAMA3, YARN

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
QWEN3_MOE = {
    "8 experts": {},
    "all experts chosen": {"num_experts": 3, "num_experts_per_tok": 3, "norm_topk_prob": True},
    "one expert chosen": {"num_experts_per_tok": 1, "norm_topk_prob": False},
    "many experts": {"num_experts": 40, "num_experts_per_tok": 8, "attention_bias": True},
    "dense layers and steps": {
        "mlp_only_layers": [1],
        "decoder_sparse_step": 2,
        "num_hidden_layers": 4,
    },
    "odd intermediate size": {"moe_intermediate_size": 7, "tie_word_embeddings": True},
}
MIXTRAL = {
    "8 experts": {},
    "one expert": {"num_local_experts": 1, "num_experts_per_tok": 1, "tie_word_embeddings": True},
    "many experts": {"num_local_experts": 33, "num_experts_per_tok": 6, "num_hidden_layers": 3},
    "odd sizes": {"intermediate_size": 13, "head_dim": 64, "num_experts_per_tok": 3},
}
TABLES = {
    "qwen3": QWEN3,
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3_moe": QWEN3_MOE,
    "mixtral": MIXTRAL,
}
EXPERTS = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
}
CASES = {
    f"{model_type} {name}": (model_type, settings)
    for model_type, cases in TABLES.items()
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
        "attention_bias": model_type != "mixtral" and chooser.random() < 0.3,
        "tie_word_embeddings": chooser.random() < 0.5,
        "rope": {"rope_type": "default"},
        **EXPERTS.get(model_type, {}),
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
    model = random_model(make_config(case), seed=len(case))
    if CASES[case][0] in EXPERTS:
        model.set_experts_implementation("eager")  # the default takes only some sizes
    return model


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


@pytest.mark.skipif(library() is None, reason="no compiler here")
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_in_bfloat16_tokens_do_not_depend_on_the_batch(quantization, make_llm, caplog, tmp_path):
    """The steps are recorded, so all of them run in C."""
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=600,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=96,
        norm_topk_prob=True,
        dtype="bfloat16",
    )
    random_model(config).save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO, "nanovllm"):
        llm = make_llm(tmp_path, device="cpu", max_model_len=MAX_LENGTH, quantization=quantization)
    assert "attention backend: cpu" in caplog.text
    assert "call by call" not in caplog.text
    prompts = random_prompts(0, 600, [3, 50, 17, 90, 1, 33])
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    together = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, together, strict=True):
        (alone,) = llm.generate([prompt], params, use_tqdm=False)
        assert alone.token_ids == output.token_ids


def save_changed(path, case, **changes):
    """Save a model with a changed config.json; return its parsed config.json."""
    make_model(case).save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    config.update(changes)
    write_json(path / "config.json", config)
    return config


def test_the_name_of_the_number_of_experts_in_transformers_4(tmp_path):
    case = "qwen3_moe 8 experts"
    config = save_changed(tmp_path, case, num_experts=8)
    del config["num_local_experts"]
    write_json(tmp_path / "config.json", config)
    assert_logits_agree(make_model(case), tmp_path, case)


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("mixtral 8 experts", {"num_experts_per_tok": 9}),
        ("qwen3_moe 8 experts", {"mlp_only_layers": 3}),
        ("qwen3_moe 8 experts", {"decoder_sparse_step": 0}),
        ("qwen3_moe 8 experts", {"num_local_experts": 9}),  # 8 have weights
    ],
    ids=str,
)
def test_settings_that_are_refused(case, change, tmp_path):
    config = save_changed(tmp_path, case, **change)
    with pytest.raises(
        CheckpointError, match=next(iter(change)) if "9" not in str(change) else None
    ):
        check_weights(read_config(config), [tmp_path / "model.safetensors"])
