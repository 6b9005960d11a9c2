"""The log-probabilities of sampling are those of scoring the same tokens later, bit for bit.

docs/training.md says when: with the C kernels of a CPU, in bfloat16 and with rounded weights.
"""

import functools
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.kernels.cpu.library import library
from nanovllm.worker.logprobs import gather_logprobs
from tests.helpers import VOCAB
from tests.training.weights import FAMILIES

pytestmark = pytest.mark.skipif(library() is None, reason="no compiler here")

NUM_CASES = int(os.environ.get("EQUALITY_CASES", "2"))
"""Batches for each engine; a long form has hundreds."""
ENGINES: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 19, "max_num_seqs": 5},
    "preemption": {"num_kvcache_blocks": 12, "max_num_batched_tokens": 64},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "scoring": {"enforce_eager": True, "max_num_batched_tokens": 40},
}
"""Each samples, all score."""


class Engines:
    """Engines of the same weights, made when they are first asked for."""

    def __init__(self, model: str, quantization: str | None) -> None:
        self._model, self._quantization = model, quantization
        self.get = functools.cache(self._make)

    def _make(self, name: str) -> LLM:
        shared = {"max_model_len": 160, "kvcache_block_size": 32, "device": "cpu"}
        llm = LLM(self._model, quantization=self._quantization, **shared, **ENGINES[name])
        assert llm.engine.executor._runner.network.backend.name == "cpu"  # type: ignore[attr-defined]
        return llm

    def shutdown(self) -> None:
        for name in ENGINES:
            self.get(name).shutdown()


@pytest.fixture(
    scope="module",
    params=[
        (family, quantization)
        for family in ("qwen3", "qwen3_5_text", "qwen3_moe")
        for quantization in (None, "int8", "int4")
        if family != "qwen3_moe" or quantization is None
    ],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def engines(request: pytest.FixtureRequest, shared_checkpoint: Any) -> Iterator[Engines]:
    family, quantization = request.param
    made = Engines(shared_checkpoint(**FAMILIES[family]), quantization)
    yield made
    made.shutdown()


_PREFIX = [(17 * place) % VOCAB for place in range(70)]
_SAMPLING = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.6, 1.0, 1.7]),
        "top_k": st.sampled_from([0, 1, 30]),
        "top_p": st.sampled_from([1.0, 0.9]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3]),
        "seed": st.integers(0, 2**40),
        "max_tokens": st.integers(1, 24),
        "logprobs": st.integers(0, 3),
        "n": st.sampled_from([1, 1, 2]),
    }
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[int], dict[str, Any]]:
    """A prompt with a cached prefix or none, with tokens that repeat or not; and its sampling."""
    prefix = _PREFIX[: draw(st.sampled_from([0, 32, 37, 64]))]
    own = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12))
    return prefix + own * draw(st.integers(1, 3)), draw(_SAMPLING)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("sampled_by", list(ENGINES)[:3])
def test_sampled_and_scored_are_equal(engines: Engines, sampled_by: str) -> None:
    """In any batch, chunk, hit and preemption; scored alone, together, and by other engines."""

    @settings(
        max_examples=NUM_CASES,
        deadline=None,
        derandomize=NUM_CASES < 10,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(requests(), min_size=1, max_size=9), st.sampled_from(list(ENGINES)))
    def check(batch: list[tuple[list[int], dict[str, Any]]], scored_by: str) -> None:
        llm = engines.get(sampled_by)
        params = [SamplingParams(**options, ignore_eos=True) for _, options in batch]
        outputs = llm.generate([prompt for prompt, _ in batch], params, use_tqdm=False)
        check_scores(outputs, engines.get(scored_by), together=True)
        check_scores(outputs[:1], llm, together=False)

    check()


def check_scores(outputs: list[RequestOutput], llm: LLM, *, together: bool) -> None:
    """Compare the log-probabilities of samples with those of a prompt that has them."""
    samples = [
        (output.prompt_token_ids, completion) for output in outputs for completion in output.outputs
    ]
    prompts = [prompt + completion.token_ids for prompt, completion in samples]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
    if together:
        scored = llm.generate(prompts, params, use_tqdm=False)
    else:
        scored = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in prompts]
    for (prompt, completion), scores in zip(samples, scored, strict=True):
        assert completion.logprobs is not None
        assert scores.prompt_logprobs is not None
        for place, (token, entries) in enumerate(
            zip(completion.token_ids, completion.logprobs, strict=True), len(prompt)
        ):
            found = scores.prompt_logprobs[place]
            assert found is not None
            assert entries[token].logprob == found[token].logprob, (place, token)
            assert entries[token].rank == found[token].rank


def test_log_softmax_of_a_row_does_not_depend_on_others() -> None:
    """It is torch's; the number of threads is part of the machine, but not of the batch."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        logits = torch.randn(9, 151_936).mul_(5).to(torch.bfloat16)
        tokens = torch.randint(151_936, (9,))
        together = gather_logprobs(logits, tokens, 2)
        for row in range(9):
            alone = gather_logprobs(logits[row : row + 1], tokens[row : row + 1], 2)
            assert torch.equal(alone.logprobs[0], together.logprobs[row])
    finally:
        torch.set_num_threads(before)
