"""Processed logits are vLLM's: behind rules, temperature, min_p, top_k and top_p."""

from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.layers.sampler import Sampling
from nanovllm.layers.sampling_tensors import KEEP_ALL
from nanovllm.worker.logprobs import processed_logits


def sampling(rows: list[dict[str, float]]) -> Sampling:
    defaults = {"temperature": 1.0, "top_k": KEEP_ALL, "top_p": 1.0, "min_p": 0.0}
    columns = {
        name: torch.tensor([row.get(name, value) for row in rows])
        for name, value in defaults.items()
    }
    zeros = torch.zeros(len(rows), dtype=torch.int64)
    return Sampling(
        columns["temperature"].float(),
        zeros,
        columns["top_k"].long(),
        columns["top_p"].float(),
        columns["min_p"].float(),
        positions=zeros,
    )


def reference(logits: torch.Tensor, row: dict[str, float]) -> torch.Tensor:
    """Do what vLLM's sampler does, one row at a time."""
    temperature = row.get("temperature", 1.0)
    if temperature < 1e-5:
        return logits
    scores = logits / temperature
    probabilities = scores.softmax(-1)
    scores = scores.masked_fill(
        probabilities < row.get("min_p", 0.0) * probabilities.max(), -torch.inf
    )
    kept = int(min(row.get("top_k", len(scores)), len(scores)))
    scores = scores.masked_fill(scores < scores.topk(kept).values[-1], -torch.inf)
    if row.get("top_p", 1.0) == 1:
        return scores
    ordered, order = scores.sort(descending=True)
    before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
    return scores.index_fill(0, order[before >= row.get("top_p", 1.0)], -torch.inf)


ROWS: list[dict[str, float]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 0.0, "top_k": 2, "top_p": 0.1, "min_p": 0.5},
    {"temperature": 1.3, "top_k": 5},
    {"top_p": 0.6},
    {"temperature": 2.0, "top_k": 40, "top_p": 0.8},
    {"temperature": 0.9, "min_p": 0.2},
    {"min_p": 0.1, "top_k": 3},
]


def test_each_filter_is_vllms() -> None:
    torch.manual_seed(0)
    logits = torch.randn(len(ROWS), 300) * 3
    found = processed_logits(logits, logits.argmax(-1), sampling(ROWS))
    for row, scores, parameters in zip(logits, found, ROWS, strict=True):
        torch.testing.assert_close(scores, reference(row, parameters))


def test_a_drawn_token_is_never_left_out() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    found = processed_logits(logits, torch.tensor([2]), sampling([{"top_k": 1}]))
    assert found.tolist() == [[3.0, -torch.inf, 1.0, -torch.inf]]
    assert logits.tolist() == [[3.0, 2.0, 1.0, 0.0]]


PARAMS = SamplingParams(
    temperature=0.7,
    top_k=8,
    repetition_penalty=1.2,
    logit_bias={3: 2.0},
    seed=5,
    max_tokens=6,
    logprobs=12,
    prompt_logprobs=2,
    ignore_eos=True,
)


@pytest.fixture(scope="module")
def outputs(random_model: str) -> dict[str, Any]:
    """The same request in each mode, and in one with drafts."""
    found = {}
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 48}
    spec = {"method": "ngram", "num_speculative_tokens": 2}
    for name in ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits", "drafts"):
        mode = "processed_logits" if name == "drafts" else name
        drafts = spec if name == "drafts" else None
        llm = LLM(random_model, logprobs_mode=mode, speculative_config=drafts, **options)
        found[name] = llm.generate([1, 2, 3, 4, 1, 2, 3], PARAMS, use_tqdm=False)[0]
        llm.shutdown()
    return found


def test_modes_of_an_engine(outputs: dict[str, Any]) -> None:
    """Tokens are the same; log-probabilities are those of the logits; prompts are raw in all."""
    raw, raw_logits = outputs["raw_logprobs"], outputs["raw_logits"]
    processed = outputs["processed_logprobs"]
    logits = outputs["processed_logits"]
    assert raw.token_ids == raw_logits.token_ids == processed.token_ids == logits.token_ids
    steps = zip(
        *(each.outputs[0].logprobs for each in (raw, raw_logits, processed, logits)),
        strict=True,
    )
    for one, two, three, four in steps:
        shifts = {two[token].logprob - one[token].logprob for token in one.keys() & two.keys()}
        assert max(shifts) - min(shifts) < 1e-4
        kept = [entry.logprob for entry in three.values() if entry.logprob > -torch.inf]
        assert len(kept) == 8
        assert sum(torch.tensor(kept).exp()) == pytest.approx(1, abs=1e-5)
        scores = torch.tensor([four[token].logprob for token in three if token in four])
        expected = torch.tensor([three[token].logprob for token in three if token in four])
        torch.testing.assert_close(scores.log_softmax(-1), expected)
    for mode, same in (("processed_logprobs", raw), ("processed_logits", raw_logits)):
        assert outputs[mode].prompt_logprobs == same.prompt_logprobs
    with_drafts = outputs["drafts"]
    assert with_drafts.token_ids == logits.token_ids
    for one, two in zip(logits.outputs[0].logprobs, with_drafts.outputs[0].logprobs, strict=True):
        for token in one.keys() & two.keys():
            assert one[token].logprob == pytest.approx(two[token].logprob, abs=1e-4)
