"""The promise: the output of a request depends on nothing but the request.

Each test generates a workload in another way, and compares with its requests one at a time, with
whole prompts and no cache. float32, so that rounding in batches of other shapes cannot change a
choice.
"""

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nanovllm import LLM, RequestOutput, SamplingParams, demo_model
from nanovllm.factory import make_engine
from nanovllm.options.config import Config
from tests.checkpoints import FAMILIES
from tests.every_case import EVERY_CASE
from tests.glossary import QUESTIONS
from tests.helpers import (
    COMPACT,
    HAS_GRAMMARS,
    Request,
    assert_idle,
    assert_same_outputs,
    generate_all,
    generate_in_random_order,
    parameter_requests,
    random_prompt,
)

PREEMPTING: dict[str, Any] = {
    "kvcache_block_size": 4,
    "num_kvcache_blocks": 64,
    "max_model_len": 256,
}
"""A pool for one sequence of 256 tokens, or for a few of the usual length."""

WAYS: dict[str, dict[str, Any]] = {
    "batches of 2": {"max_num_seqs": 2},
    "batches of 64": {"max_num_seqs": 64},
    "chunks of 1": {"max_num_batched_tokens": 1},
    "blocks of 1, no prefix cache": {"kvcache_block_size": 1, "enable_prefix_caching": False},
    "blocks of 3": {"kvcache_block_size": 3},
    "blocks of 256": {"kvcache_block_size": 256},
    "warm, whole prompts": {"kvcache_block_size": 4},
    "warm, chunks of 7": {"kvcache_block_size": 4, "max_num_batched_tokens": 7},
    "preemption": PREEMPTING,
    "preemption, no prefix cache": {**PREEMPTING, "enable_prefix_caching": False},
}
"""Where it is warm, the workload is generated twice: then prompts hit the prefix cache."""
FEW = ("warm, chunks of 7", "preemption")
NOT_ALWAYS = ("blocks of 1, no prefix cache", "blocks of 256", "warm, whole prompts")
"""For the workload "parameters". The others have only `FEW`, unless all cases run."""


def each_way() -> Iterator[Any]:
    """Yield the cases of workloads and ways."""
    for name in ("parameters", *FAMILIES, "glossary"):
        for way in WAYS:
            usual = way not in NOT_ALWAYS if name == "parameters" else way in FEW
            if EVERY_CASE or (usual and name != "qwen3"):  # that is the model of "parameters"
                yield pytest.param(name, way, id=f"{name}-{way}")


RANKS = [
    ("parameters", 4),
    pytest.param("parameters", 2, marks=pytest.mark.long),
    pytest.param("llama", 2, marks=pytest.mark.long),
]
"""Tensor-parallel sizes. The random models have 2 KV heads, so 4 ranks need copies of them; llama
has all biases. test_structured_outputs.py has the demo model.
"""


class Workload(NamedTuple):
    model: str
    options: dict[str, Any]
    requests: list[Request]
    expected: Sequence[RequestOutput] = ()
    """What each request gives: one at a time, whole prompts, no cache."""


def random_workload(model: str, num_requests: int) -> Workload:
    """Prompts of 1 to 30 tokens, many with a shared prefix; greedy and seeded in turn."""
    rng = random.Random(0)
    shared = random_prompt(rng, 24)
    prompts: list[list[int]] = []
    for index in range(num_requests):
        start = shared[: rng.choice([0, 0, 4, 16, 24])]
        prompts.append(start + random_prompt(rng, rng.randint(1, 30 - len(start))))
        if index % 9 == 8:
            prompts[-1] = list(prompts[-2])
    params = [
        SamplingParams(temperature=0.8 * (index % 2), seed=index, max_tokens=rng.randint(1, 14))
        for index in range(num_requests)
    ]
    options = {"dtype": "float32", "max_model_len": 64}
    return Workload(model, options, list(zip(prompts, params, strict=True)))


def glossary_workload() -> Workload:
    """Questions to the demo model, a trained one. Some are answered in JSON, some have stop strings
    that span words or lie in one.
    """
    plain = SamplingParams(temperature=0, max_tokens=96)
    stops = plain.clone(stop=["ache", "s to", "tion", ". "])
    kinds = [
        plain.clone(structured_outputs=COMPACT, temperature=1.0, seed=7) if HAS_GRAMMARS else plain,
        stops,
        *[plain] * 3,
        stops.clone(include_stop_str_in_output=True),
    ]
    options = {"dtype": "float32", "max_model_len": 256}
    requests: list[Request] = [
        (question, kinds[index % 6]) for index, question in enumerate(QUESTIONS[:14])
    ]
    return Workload(demo_model.MODEL, options, requests)


@pytest.fixture(scope="module")
def workload_of(shared_checkpoint: Callable[..., str]) -> Callable[[str], Workload]:
    """Return the workload of a name, with what its requests give; each is computed once."""

    @functools.cache
    def make(name: str) -> Workload:
        if name == "glossary":
            made = glossary_workload()
        elif name == "parameters":
            options = {"dtype": "float32", "max_model_len": 48}
            made = Workload(shared_checkpoint(), options, parameter_requests())
        else:
            model = shared_checkpoint(**FAMILIES[name])
            made = random_workload(model, num_requests=40 if EVERY_CASE else 24)
        llm = LLM(made.model, max_num_seqs=1, enable_prefix_caching=False, **made.options)
        outputs = [generate_all(llm, [request])[0] for request in made.requests]
        llm.shutdown()
        return made._replace(expected=outputs)

    return make


@pytest.fixture
def workload(request: pytest.FixtureRequest, workload_of: Callable[[str], Workload]) -> Workload:
    return workload_of(request.param)


@pytest.fixture
def check(workload: Workload, make_llm: Any) -> Callable[..., None]:
    """Compare the first `num` requests under options with what is expected; twice if `warm`."""

    def run(num: int | None = None, *, warm: bool = False, **options: Any) -> None:
        llm = make_llm(workload.model, **{**workload.options, **options})
        requests = workload.requests[:num]
        outputs = generate_all(llm, requests)
        if warm:
            outputs = generate_all(llm, requests)
            assert sum(output.num_cached_tokens for output in outputs) > 2 * len(requests)
        assert_idle(llm)
        assert_same_outputs(outputs, workload.expected[:num])

    return run


@pytest.mark.parametrize("workload", ["parameters"], indirect=True)
def test_the_workload_ends_in_every_way(workload: Workload) -> None:
    """It has every kind of end, and outputs that differ."""
    expected = workload.expected
    completions = [c for output in expected for c in output.outputs]
    ends = {(c.finish_reason, type(c.stop_reason)) for c in completions}
    assert ends == {("stop", int), ("stop", type(None)), ("length", type(None))}
    assert {len(output.outputs) for output in expected} == {1, 2, 3}
    assert len({tuple(c.token_ids) for c in completions}) > 0.8 * len(completions)
    for (_, params), output in zip(workload.requests, expected, strict=True):
        for completion in output.outputs:
            if params.allowed_token_ids is not None:
                assert set(completion.token_ids) <= set(params.allowed_token_ids)
            if completion.finish_reason == "stop":
                assert len(completion.token_ids) > params.min_tokens


@pytest.mark.parametrize(("workload", "way"), [*each_way()], indirect=["workload"])
def test_outputs_do_not_depend_on_the_way(
    check: Callable[..., None], preempted: list[Any], way: str
) -> None:
    num = 10 if way == "chunks of 1" else None  # a step for each token
    check(num, warm="warm" in way, **WAYS[way])
    assert preempted or "preemption" not in way


@pytest.mark.parametrize("workload", ["parameters", "glossary"], indirect=True)
def test_outputs_do_not_depend_on_tiers_below_the_pool(
    check: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("nanovllm.features.tiers.traffic.TierTraffic.pays", lambda self, *_: True)
    tiers = {"kv_offload_gib": 0.02, "kv_cache_dir": tmp_path}
    options = {**PREEMPTING, **tiers}
    check(warm=True, **options)
    check(**options)  # another engine, the same directory


@pytest.mark.parametrize("workload", ["parameters"], indirect=True)
def test_outputs_do_not_depend_on_hash_collisions(
    check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanovllm.kv.trie.xxh3_128_digest", lambda data: b"42")
    check(kvcache_block_size=4)


@pytest.mark.parametrize("workload", ["parameters", "glossary"], indirect=True)
@pytest.mark.parametrize("queue_depth", [0, 1, 4])
def test_outputs_do_not_depend_on_arrival_and_priority(
    workload: Workload, queue_depth: int
) -> None:
    """Requests arrive in random order, with random priorities; some are aborted and come again."""
    options = {**workload.options, **PREEMPTING, "max_num_seqs": 8, "max_num_batched_tokens": 24}
    engine = make_engine(Config(model=workload.model, **options), queue_depth=queue_depth)
    outputs = generate_in_random_order(engine, workload.requests, seed=queue_depth)
    engine.shutdown()
    assert_same_outputs(outputs, workload.expected)


@pytest.mark.parametrize(("workload", "num_ranks"), RANKS, indirect=["workload"])
def test_outputs_do_not_depend_on_tensor_parallelism(
    workload: Workload,
    tensor_parallel_llm: Any,
    num_ranks: int,
    make_llm: Any,
    preempted: list[Any],
) -> None:
    """Also of requests that are preempted, and resume."""
    llm = tensor_parallel_llm(workload.model, num_ranks)
    assert_same_outputs(generate_all(llm, workload.requests), workload.expected)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    requests: list[Request] = [([index + 1] * 9, params) for index in range(16)]
    expected = generate_all(make_llm(workload.model, **workload.options), requests)
    preempted.clear()
    assert_same_outputs(generate_all(llm, requests), expected)
    assert preempted
    assert_idle(llm)
