"""Recorded steps of models with layers that keep a state."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.features.graphs.cpu_graph import CPUGraphRunner
from tests.helpers import random_prompt, token_ids
from tests.kernels.cpu.helpers import native
from tests.speculation.proposers.drafting import allow_all

DELTA = {"linear_key_head_dim": 24, "linear_value_head_dim": 16, "linear_num_key_heads": 2}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
MIXED = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
MODELS: dict[str, dict[str, Any]] = {
    "gated delta": {"model_type": "qwen3_5_text", "linear_num_value_heads": 4, **DELTA, **MIXED},
    "experts": {
        "model_type": "qwen3_5_moe_text",
        "linear_num_value_heads": 2,
        **DELTA,
        **MIXED,
        **EXPERTS,
    },
    "short convolution": {
        "model_type": "lfm2",
        "layer_types": ["conv", "full_attention", "conv"],
        "block_auto_adjust_ff_dim": False,
    },
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The numbers of drafts of the rows of all recorded steps."""
    found: list[list[int]] = []
    forward = CPUGraphRunner.forward

    def count(self: CPUGraphRunner, rows: Any) -> Any:
        found.append([row.num_draft_tokens for row in rows])
        return forward(self, rows)

    monkeypatch.setattr(CPUGraphRunner, "forward", count)
    return found


def generate(llm: LLM) -> list[list[int]]:
    """Return the tokens of prompts of many lengths, some greedy, some drawn."""
    rng = random.Random(0)
    prompts = [random_prompt(rng, length) for length in (1, 9, 40, 64, 100, 3)]
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=5 + 4 * i, ignore_eos=True)
        for i in range(len(prompts))
    ]
    return token_ids(llm.generate(prompts, params, use_tqdm=False))


@native
@pytest.mark.parametrize("model", MODELS)
def test_recorded_steps_change_no_token(
    model: str,
    shared_checkpoint: Callable[..., str],
    make_llm: Callable[..., LLM],
    recorded: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = shared_checkpoint(**{**MODELS[model], "dtype": "bfloat16"})
    options: dict[str, Any] = {"device": "cpu", "max_model_len": 160, "max_num_seqs": 4}
    expected = generate(make_llm(path, enforce_eager=True, **options))
    assert not recorded
    assert generate(make_llm(path, **options)) == expected
    assert {1, 4} <= set(map(len, recorded))
    llm = make_llm(path, speculative_config=NGRAM, **options)
    recorded.clear()
    allow_all(monkeypatch)
    assert generate(llm) == expected
    assert 4 in {len(drafts) for drafts in recorded if any(drafts)}
