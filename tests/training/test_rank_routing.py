"""The experts that outputs name are those that the model's routers chose."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from nanovllm import LLM, SamplingParams, demo_model
from nanovllm.errors import ConfigError
from tests.helpers import random_prompt
from tests.training.weights import FAMILIES

OPTIONS: dict[str, Any] = {"max_model_len": 128, "kvcache_block_size": 32, "device": "cpu"}
ROUTED = {**OPTIONS, "enable_return_routed_experts": True}


def test_experts_are_those_of_the_model(
    shared_checkpoint: Callable[..., str], make_llm: Callable[..., LLM]
) -> None:
    """Chunks, preemption and batches; in float32 beside transformers' own router."""
    model = shared_checkpoint(**FAMILIES["qwen3_moe"])
    rng = random.Random(0)
    prompts = [random_prompt(rng, length) for length in (40, 3, 25, 40)]
    prompts.append(prompts[0])  # a prefix that would hit
    params = SamplingParams(max_tokens=9, ignore_eos=True, seed=3)
    small = {"max_num_batched_tokens": 19, "num_kvcache_blocks": 5, "dtype": "float32"}
    llm = make_llm(model, **ROUTED, **small)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    top_k = theirs.config.num_experts_per_tok
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.num_cached_tokens == 0
        tokens = prompt + output.token_ids
        found = output.outputs[0].routed_experts
        assert found.shape == (len(tokens) - 1, theirs.config.num_hidden_layers, top_k)
        assert found.dtype == np.uint8
        with torch.no_grad():
            logits = theirs(torch.tensor([tokens[:-1]]), output_router_logits=True).router_logits
        expected = torch.stack([layer.topk(top_k).indices for layer in logits], 1)
        same = (torch.from_numpy(found).sort(-1)[0] == expected.sort(-1)[0]).all(-1)
        assert same.float().mean() > 0.99  # but for ties in rounding


def test_tokens_are_those_without(
    shared_checkpoint: Callable[..., str], make_llm: Callable[..., LLM]
) -> None:
    model = shared_checkpoint(**FAMILIES["qwen3_moe"])
    prompts = [random_prompt(random.Random(1), 20)] * 2
    params = SamplingParams(max_tokens=12, logprobs=0, seed=1)
    plain, routed = (
        make_llm(model, **options).generate(prompts, params, use_tqdm=False)
        for options in (OPTIONS, ROUTED)
    )
    assert [o.token_ids for o in plain] == [o.token_ids for o in routed]
    assert [o.outputs[0].cumulative_logprob for o in plain] == [
        o.outputs[0].cumulative_logprob for o in routed
    ]
    assert plain[0].outputs[0].routed_experts is None


def test_models_without_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match="is for models with experts, and this one has none"):
        LLM(demo_model.MODEL, **ROUTED)
    with pytest.raises(ConfigError, match="has each token computed, layer by layer"):
        LLM(demo_model.MODEL, **ROUTED, kv_offload_gib=0.1)
