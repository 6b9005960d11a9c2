"""Speculation changes the speed and nothing else: tokens, texts, log-probabilities and the ends of
requests are those of the same engine without it, whatever a proposer proposes.

Two scripted proposers know the right tokens: one always proposes them, one is wrong at random.
"""

import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.scripted import Scripted
from nanovllm import LLM, RequestOutput, SamplingParams, demo_model
from nanovllm.core.sequence import Sequence
from nanovllm.factory import make_engine
from nanovllm.kernels.cpu.library import library
from nanovllm.options.config import Config
from tests.glossary import QUESTIONS
from tests.helpers import (
    COMPACT,
    HAS_GRAMMARS,
    Request,
    assert_idle,
    generate_all,
    generate_in_random_order,
)
from tests.speculation.proposers.drafting import allow_all, use_scripted, watch_sequences

NATIVE = pytest.mark.skipif(library() is None, reason="no compiler here")
OPTIONS: dict[str, Any] = {"max_model_len": 192, "kvcache_block_size": 32}
SPECULATIVE: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 5}
PREEMPTING: dict[str, Any] = {"num_kvcache_blocks": 8, "max_model_len": 192}


def make_requests() -> list[Request]:
    """44 requests: every sampling parameter, at four temperatures."""
    rng = random.Random(0)
    special: list[dict[str, Any]] = [
        {"top_k": 20},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"presence_penalty": 0.7, "frequency_penalty": 0.3},
        {"repetition_penalty": 1.3},
        {"logit_bias": {5: 3.0, 300: -2.0}},
        {"bad_words": ["the", " attention"]},
        {"min_tokens": 12},
        {"allowed_token_ids": list(range(0, 1024, 3))},
        {"stop": ["a ", "KV"]},
        {"stop": [" of"], "include_stop_str_in_output": True},
        {"stop_token_ids": list(range(200, 260))},
        {"logprobs": 3},
        {"logprobs": 0, "prompt_logprobs": 2},
        {"n": 3},
        {"ignore_eos": True},
        {"logits_processors": [lower_even]},
        {"max_tokens": 1},
        {"skip_special_tokens": False},
        {},
    ]
    if HAS_GRAMMARS:
        regex = {"structured_outputs": {"regex": "[A-Z][a-z ]+"}, "logprobs": 1}
        special += [{"structured_outputs": COMPACT}, regex]
    requests: list[Request] = []
    for index, options in enumerate(special * 2):
        question = QUESTIONS[index % len(QUESTIONS)]
        prompt = question if index % 3 else [rng.randrange(1000) for _ in range(rng.randint(1, 70))]
        params = {
            "temperature": (0.0, 0.3, 1.0, 1.7)[(index + index // len(special)) % 4],
            "seed": index,
        }
        requests.append((prompt, SamplingParams(**{"max_tokens": 30, **params, **options})))
    return requests


def lower_even(token_ids: list[int], logits: Any) -> Any:
    """Make even tokens less likely after an even number of tokens."""
    if len(token_ids) % 2 == 0:
        logits[::2] -= 1.5
    return logits


def results(outputs: list[RequestOutput]) -> list[Any]:
    """Return all of the outputs that must be the same: the whole output without its times."""
    return [
        [dataclasses.astuple(completion) for completion in output.outputs]
        + [output.prompt_token_ids, output.prompt_logprobs]
        for output in outputs
    ]


@dataclasses.dataclass
class Expected:
    """What the requests give without speculation."""

    results: list[Any]
    sequences: list[Sequence]


@pytest.fixture(scope="module")
def expected_of() -> Callable[..., Expected]:
    """Return what the requests give one at a time, without a cache and without speculation."""
    found: dict[str, Expected] = {}

    def compute(**options: Any) -> Expected:
        name = repr(sorted(options.items()))
        if name not in found:
            with pytest.MonkeyPatch.context() as patch:
                sequences = watch_sequences(patch)
                cold = {"max_num_seqs": 1, "enable_prefix_caching": False}
                llm = LLM(demo_model.MODEL, **{**OPTIONS, **cold, **options})
                outputs = generate_all(llm, make_requests())
                llm.shutdown()
            found[name] = Expected(results(outputs), sequences)
        return found[name]

    return compute


@pytest.fixture(params=[1.0, 0.6], ids=["right", "wrong at random"])
def scripted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Scripted:
    return use_scripted(monkeypatch, request.param)


@pytest.fixture
def check(
    expected_of: Callable[..., Expected], scripted: Scripted, make_llm: Any
) -> Callable[..., LLM]:
    """Compare the requests with speculation and `options` with those without, under `base`."""

    def run(base: dict[str, Any] | None = None, *, rounds: int = 1, **options: Any) -> LLM:
        expected = expected_of(**(base or {}))
        scripted.learn(expected.sequences)
        options = {**OPTIONS, **(base or {}), "speculative_config": SPECULATIVE, **options}
        llm: LLM = make_llm(demo_model.MODEL, **options)
        for _ in range(rounds):
            assert results(generate_all(llm, make_requests())) == expected.results
        assert_idle(llm)
        drafts = llm.engine.scheduler.drafting.counts
        share = drafts.num_accepted_tokens / drafts.num_draft_tokens
        assert share > 0.9 if scripted.acceptance == 1.0 else 0.2 < share < 0.7
        return llm

    return run


@pytest.mark.thinned(4)
@NATIVE
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_seqs": 1},
        {"max_num_seqs": 3},
        {"max_num_seqs": 64},
        {"max_num_batched_tokens": 9},
        {"enable_prefix_caching": False},
        {"enforce_eager": True},
    ],
    ids=str,
)
def test_outputs_do_not_depend_on_speculation(
    check: Callable[..., LLM], options: dict[str, Any]
) -> None:
    check(**options)


@pytest.mark.thinned(2)
@NATIVE
@pytest.mark.parametrize(
    "base",
    [{"quantization": "int8"}, {"quantization": "int4"}, {"kv_cache_dtype": "int8"}],
    ids=str,
)
def test_in_8_and_4_bits(check: Callable[..., LLM], base: dict[str, Any]) -> None:
    check(base)


@pytest.mark.long
@pytest.mark.parametrize("scripted", [0.6], ids=["wrong at random"], indirect=True)
def test_in_float32_with_plain_torch(
    expected_of: Callable[..., Expected], scripted: Scripted, make_llm: Any
) -> None:
    """Torch's sums depend on the batch, so log-probabilities differ by rounding."""
    base = {"dtype": "float32", "native_kernels": False, "kvcache_block_size": 4}
    expected = expected_of(**base)
    scripted.learn(expected.sequences)
    llm: LLM = make_llm(demo_model.MODEL, **OPTIONS | base, speculative_config=SPECULATIVE)
    for output, before in zip(generate_all(llm, make_requests()), expected.results, strict=True):
        for completion, (_, text, tokens, *ends, _) in zip(output.outputs, before, strict=False):
            assert (completion.text, completion.token_ids) == (text, tokens)
            assert (completion.finish_reason, completion.stop_reason) == tuple(ends[:2])
            assert completion.cumulative_logprob == pytest.approx(ends[2], abs=1e-4)
    assert llm.engine.scheduler.drafting.counts.num_accepted_tokens > 100


@NATIVE
def test_with_a_warm_prefix_cache(check: Callable[..., LLM]) -> None:
    check(rounds=2)


@NATIVE
def test_with_preemption(check: Callable[..., LLM], preempted: list[Any]) -> None:
    check(**PREEMPTING)
    assert preempted


@pytest.mark.thinned(2)
@NATIVE
@pytest.mark.parametrize(("seed", "queue_depth"), [(0, 0), (1, 1), (2, 4)])
def test_with_arrivals_priorities_and_aborts(
    expected_of: Callable[..., Expected], scripted: Scripted, seed: int, queue_depth: int
) -> None:
    expected = expected_of()
    scripted.learn(expected.sequences)
    options = {**OPTIONS, **PREEMPTING, "max_num_seqs": 8, "max_num_batched_tokens": 24}
    config = Config(model=demo_model.MODEL, speculative_config=SPECULATIVE, **options)
    engine = make_engine(config, queue_depth=queue_depth)
    outputs = generate_in_random_order(engine, make_requests(), seed)
    engine.shutdown()
    assert results(outputs) == expected.results
    assert engine.scheduler.drafting.counts.num_accepted_tokens > 100


REAL_METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
    "draft_model": {"model": demo_model.DRAFT_MODEL, "num_speculative_tokens": 4},
    "eagle3": {"model": demo_model.EAGLE3, "num_speculative_tokens": 4},
}


@pytest.mark.thinned(2)
@NATIVE
@pytest.mark.parametrize("method", REAL_METHODS)
@pytest.mark.parametrize("queue_depth", [0, 1])
def test_shipped_drafts_change_nothing(
    expected_of: Callable[..., Expected],
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    queue_depth: int,
) -> None:
    """The same requests with each method, in random order, with priorities and aborts."""
    allow_all(monkeypatch)
    expected = expected_of()
    config = Config(
        model=demo_model.MODEL, speculative_config=REAL_METHODS[method], **OPTIONS | PREEMPTING
    )
    engine = make_engine(config, queue_depth=queue_depth)
    outputs = generate_in_random_order(engine, make_requests(), seed=3)
    engine.shutdown()
    assert results(outputs) == expected.results
    assert engine.scheduler.drafting.counts.num_accepted_tokens > 20


@NATIVE
def test_ngram_on_two_ranks(
    expected_of: Callable[..., Expected], make_llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text that repeats, so that drafts are found; each rank looks for itself."""
    allow_all(monkeypatch)
    prompts = [[5, 6, 7, 8] * 4, [300, 301, 302] * 6, *QUESTIONS[:14]]
    params = [SamplingParams(temperature=i % 2 / 2, seed=i, max_tokens=48) for i in range(16)]
    speculating = {"speculative_config": REAL_METHODS["ngram"], "tensor_parallel_size": 2}
    found = []
    for options in ({}, speculating):
        llm: LLM = make_llm(demo_model.MODEL, dtype="float32", **OPTIONS, **options)
        found.append(generate_all(llm, list(zip(prompts, params, strict=True))))
    assert [output.outputs for output in found[0]] == [output.outputs for output in found[1]]
    assert llm.engine.scheduler.drafting.counts.num_accepted_tokens > 10


@NATIVE
def test_unseeded_tokens_have_the_same_distribution(
    make_llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chi-square of the third token, which an accepted draft may be, with and without drafts."""
    allow_all(monkeypatch)
    prompts = 2000 * [[17, 500, 33, 801]]  # no question, so many answers are likely
    params = SamplingParams(temperature=1.7, max_tokens=4, ignore_eos=True)
    options = {**OPTIONS, "max_num_seqs": 64}
    counts = []
    for seed, spec in ((0, None), (1, REAL_METHODS["draft_model"])):
        llm: LLM = make_llm(demo_model.MODEL, seed=seed, speculative_config=spec, **options)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        counts.append(Counter(output.outputs[0].token_ids[2] for output in outputs))
    assert llm.engine.scheduler.drafting.counts.num_accepted_tokens > 500
    common = [token for token, count in (counts[0] + counts[1]).items() if count >= 20]
    rows = [[count[token] for token in common] for count in counts]
    table = [[*row, 3000 - sum(row)] for row in rows]
    statistic = sum((a - b) ** 2 / (a + b) for a, b in zip(*table, strict=True) if a + b)
    freedom = torch.tensor(float(len(common)))
    p_value = torch.special.gammaincc(freedom / 2, torch.tensor(statistic / 2)).item()
    assert len(common) > 10
    assert p_value > 1e-3
