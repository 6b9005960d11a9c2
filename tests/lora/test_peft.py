"""Adapters that PEFT itself saved, beside the models that PEFT itself merged; and two ranks.

PEFT takes seconds to import, so LORA_CASES=all runs most of it.
"""

import itertools
import os
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.helpers import random_prompt
from tests.lora.adapters import linears_of, write_adapter
from tests.lora.test_equality import OPTIONS, ask, bits, mixed, request
from tests.models.comparison import assert_tokens_are_greedy

pytestmark = pytest.mark.skipif("LORA_CASES" not in os.environ, reason="LORA_CASES=all runs it")

TARGETS: list[dict[str, Any]] = [
    {"target_modules": "all-linear"},
    {"target_modules": ["q_proj", "v_proj"]},
    {"target_modules": ["self_attn.o_proj", "model.layers.1.mlp.down_proj"]},
    {"target_modules": r".*layers\.[02]\.mlp\.(gate|up)_proj"},
    {"target_modules": ["k_proj", "up_proj"], "layers_to_transform": [0, 2]},
    {"target_modules": "all-linear", "exclude_modules": ["k_proj"]},
]
SCALES: list[dict[str, Any]] = [
    {},
    {"use_rslora": True},
    {
        "rank_pattern": {"q_proj": 3, r"layers\.1\.mlp\..*": 12},
        "alpha_pattern": {"v_proj": 5, "down_proj": 1.5},
    },
]
RANKS = [1, 8, 64]
KINDS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}


def peft_adapter(model: str, path: Path, seed: int, **config: Any) -> Any:
    """Save a random adapter by PEFT; return transformers' model with it merged by PEFT."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    config = {"lora_alpha": 4, "init_lora_weights": False, **config}
    adapted = get_peft_model(theirs, LoraConfig(**config))
    adapted.save_pretrained(path)
    return adapted.merge_and_unload()


@pytest.mark.parametrize("rank", RANKS)
def test_float32_tokens(make_llm: Any, random_model: str, tmp_path: Path, rank: int) -> None:
    """All target sets and scales, in one batch: greedy tokens."""
    llm = make_llm(random_model, **{**OPTIONS, "max_loras": 8, "dtype": "float32"})
    prompts = [random_prompt(random.Random(seed), 5 + 9 * seed) for seed in range(2)]
    for number, (targets, scale) in enumerate(itertools.product(TARGETS, SCALES)):
        if isinstance(targets["target_modules"], list) and "rank_pattern" in scale:
            continue  # PEFT refuses patterns without a module
        path = tmp_path / str(number)
        theirs = peft_adapter(random_model, path, number, r=rank, **targets, **scale)
        outputs = ask(llm, [(prompt, request(str(path))) for prompt in prompts])
        assert_tokens_are_greedy(theirs, prompts, [output.outputs[0] for output in outputs])


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_two_ranks(
    make_llm: Any, shared_checkpoint: Any, tmp_path: Path, quantization: Any
) -> None:
    """Each request as alone, and in float32 the tokens of one rank."""
    model = shared_checkpoint(head_dim=32, intermediate_size=128)
    paths = [
        write_adapter(tmp_path / str(seed), linears_of(model), seed=seed, r=4) for seed in range(3)
    ]
    asked = mixed(paths, 12)
    options = {**OPTIONS, "tensor_parallel_size": 2}
    if quantization is None:
        one = make_llm(model, dtype="float32", **OPTIONS)
        two = make_llm(model, dtype="float32", **options)
        expected, found = (ask(llm, asked) for llm in (one, two))
        assert [o.token_ids for o in found] == [o.token_ids for o in expected]
    llm = make_llm(model, dtype="bfloat16", quantization=quantization, **options)
    together = bits(ask(llm, asked))
    assert together == [bits(ask(llm, [each]))[0] for each in asked]
