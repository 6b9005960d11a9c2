"""What the tests of draft networks share: a workload, its engine, and what was drafted.

Every row gets as many drafts as it can take, so each test speculates in every step.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.scripted import Scripted
from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.core.sequence import Sequence
from nanovllm.features.speculation import proposers
from nanovllm.features.speculation.draft_controller import DraftController
from nanovllm.features.speculation.proposers.draft_network import DraftNetwork
from nanovllm.scheduler.scheduler import Scheduler
from tests.helpers import Request, assert_idle, generate_all, random_prompt

MAX_MODEL_LEN = 96

NATIVE: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_attention_heads": 6,
    "head_dim": 32,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
"""A model whose rows the C kernels compute in the same bits in every batch."""
PREEMPTING: dict[str, Any] = {"kvcache_block_size": 4, "num_kvcache_blocks": 40}

Drafted = dict[tuple[int, tuple[int, ...]], tuple[int, ...]]
"""By seed and tokens of a sequence: the longest drafts that were proposed behind them."""


def allow_all(monkeypatch: pytest.MonkeyPatch, seed: int | None = None) -> None:
    """Let the controller allow all drafts; with a `seed`, any number from 0 on at random."""
    rng = random.Random(seed)

    def choose(self: DraftController, candidates: Any, num_tokens: int) -> list[int]:
        limits = [max(0, min(limit, self.max_draft_tokens)) for _, limit in candidates]
        return limits if seed is None else [rng.choice([0, rng.randint(0, n)]) for n in limits]

    monkeypatch.setattr(DraftController, "choose", choose)
    monkeypatch.setattr(DraftController, "skips_step", lambda self: False)


def use_scripted(monkeypatch: pytest.MonkeyPatch, acceptance: float) -> Scripted:
    """Let all engines have one scripted proposer, and ask it for drafts in every step."""
    proposer = Scripted(acceptance)
    monkeypatch.setattr(proposers, "make_proposer", lambda *_: proposer)
    allow_all(monkeypatch)
    return proposer


def watch_sequences(monkeypatch: pytest.MonkeyPatch) -> list[Sequence]:
    """Return the sequences that all engines have from now on."""
    found: list[Sequence] = []
    add = Scheduler.add
    monkeypatch.setattr(Scheduler, "add", lambda self, seq: (found.append(seq), add(self, seq))[1])
    return found


def watch_drafts(monkeypatch: pytest.MonkeyPatch, known: Drafted | None = None) -> Drafted:
    """Return the drafts that all engines propose from now on, with those `known` before.

    Fails if other drafts follow the same tokens: they depend on nothing else.
    """
    drafted: Drafted = dict(known or {})
    propose = DraftNetwork.propose

    def watched(self: DraftNetwork, rows: Any) -> list[int]:
        counts = propose(self, rows)
        tables = self._tables
        assert tables is not None
        for row, count in zip(rows, counts, strict=True):
            assert 0 <= count <= row.num_draft_tokens
            seed, end = int(tables.sampling_tensors.seeds[row.table_idx]), row.sample_position
            if not seed:  # a table row without a sequence, to measure what drafts cost
                continue
            tokens = tables.token_ids[row.table_idx, : end + count].tolist()
            key = seed, tuple(tokens[:end])
            before, drafts = drafted.get(key, ()), tuple(tokens[end:])
            common = min(len(before), len(drafts))
            assert before[:common] == drafts[:common]
            drafted[key] = max(before, drafts, key=len)
        return counts

    monkeypatch.setattr(DraftNetwork, "propose", watched)
    return drafted


def make_requests(count: int, *, sharing: bool = True) -> list[Request]:
    """Return prompts of 1 to 40 tokens and all kinds of parameters.

    Args:
        sharing: whether many of the prompts have a prefix in common.
    """
    rng = random.Random(0)
    shared = random_prompt(rng, 36)
    requests: list[Request] = []
    for index in range(count):
        start = shared[: rng.choice([0, 0, 4, 16, 36]) * sharing]
        params: dict[str, Any] = {"temperature": (0.0, 0.3, 1.0, 1.7)[index % 4], "seed": 1 + index}
        params |= [
            {},
            {"top_k": 20, "logprobs": 2},
            {"presence_penalty": 0.5, "repetition_penalty": 1.3},
            {"min_p": 0.05, "logit_bias": {5: 4.0}},
            {"top_p": 0.8, "prompt_logprobs": 1, "min_tokens": 4},
        ][index % 5]
        prompt = start + random_prompt(rng, rng.randint(1, 40 - len(start)))
        max_tokens = rng.randint(1, 24)
        params |= {"max_tokens": max_tokens, "ignore_eos": index % 2 == 0}
        requests.append((prompt, SamplingParams(**params)))
    return requests


def speculating(method: str, model: str, num_tokens: int = 5) -> dict[str, Any]:
    spec = {"method": method, "model": model, "num_speculative_tokens": num_tokens}
    return {"speculative_config": spec}


def run(
    make_llm: Callable[..., LLM],
    model: str,
    requests: list[Request],
    rounds: int = 1,
    **options: Any,
) -> tuple[list[RequestOutput], LLM]:
    """Generate `requests`, and again for each further round; return all outputs, and the LLM."""
    llm = make_llm(model, max_model_len=MAX_MODEL_LEN, **options)
    outputs = [output for _ in range(rounds) for output in generate_all(llm, requests)]
    assert_idle(llm)
    return outputs, llm


def acceptance(llm: LLM) -> tuple[int, int]:
    """Return (accepted, proposed) drafts of all requests."""
    drafts = llm.engine.scheduler.drafting.counts
    return drafts.num_accepted_tokens, drafts.num_draft_tokens
