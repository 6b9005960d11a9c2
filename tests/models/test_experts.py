"""Logits and greedy tokens of random small models with experts against transformers."""

import json
import logging
import random

import pytest
from transformers import AutoConfig

from nanovllm import SamplingParams
from nanovllm.errors import CheckpointError
from nanovllm.kernels.cpu.library import library
from nanovllm.models.registry import read_config
from nanovllm.worker.model_loader import check_weights
from tests.checkpoints import random_model
from tests.models.comparison import (  # noqa: F401
    MAX_LENGTH,
    assert_logits_agree,
    check_answers,
    random_prompts,
    runs,
    saved_models,
    test_logits_of_all_positions,
)

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
CASES = {
    f"{model_type} {name}": (model_type, settings)
    for model_type, cases in {"qwen3_moe": QWEN3_MOE, "mixtral": MIXTRAL}.items()
    for name, settings in cases.items()
}


def make_model(case):
    """Return a model of transformers. Sizes that the case does not set are random."""
    model_type, changes = CASES[case]
    chooser = random.Random(case)
    kv_heads = chooser.choice([1, 2, 3])
    settings = {
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * chooser.choice([1, 2, 4]),
        "head_dim": chooser.choice([16, 18, 32]),
        "hidden_size": chooser.choice([32, 56, 90]),
        "intermediate_size": chooser.choice([20, 33]),
        "num_hidden_layers": chooser.choice([1, 2]),
        "vocab_size": chooser.choice([500, 1003]),
        "tie_word_embeddings": chooser.random() < 0.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": chooser.choice([1e4, 1e6])},
        "max_position_embeddings": 4096,
    }
    if model_type == "qwen3_moe":
        settings |= {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
        settings["norm_topk_prob"] = chooser.random() < 0.5
    else:
        settings |= {"num_local_experts": 8, "num_experts_per_tok": 2}
    model = random_model(AutoConfig.for_model(model_type, **settings | changes), seed=len(case))
    model.set_experts_implementation("eager")  # the default takes only some sizes
    return model


saved = saved_models(make_model, CASES)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("saved", "chunk"), runs(CASES, every=3), indirect=["saved"])
def test_greedy_tokens(saved, chunk, make_llm):
    check_answers(saved, chunk, make_llm)


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
    (path / "config.json").write_text(json.dumps(config))
    return config


def test_the_name_of_the_number_of_experts_in_transformers_4(tmp_path):
    case = "qwen3_moe 8 experts"
    config = save_changed(tmp_path, case, num_experts=8)
    del config["num_local_experts"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_logits_agree(make_model(case), tmp_path, case)


@pytest.mark.parametrize(
    ("case", "change", "error"),
    [
        ("mixtral 8 experts", {"num_experts_per_tok": 9}, CheckpointError),
        ("qwen3_moe 8 experts", {"mlp_only_layers": 3}, CheckpointError),
        ("qwen3_moe 8 experts", {"decoder_sparse_step": 0}, CheckpointError),
        ("qwen3_moe 8 experts", {"num_local_experts": 9}, CheckpointError),  # 8 have weights
    ],
    ids=str,
)
def test_settings_that_are_refused(case, change, error, tmp_path):
    config = save_changed(tmp_path, case, **change)
    with pytest.raises(error, match=next(iter(change)) if "9" not in str(change) else None):
        check_weights(read_config(config), [tmp_path / "model.safetensors"])
