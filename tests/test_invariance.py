"""The promise: the output of a request depends on nothing but the request.

Each test generates a workload in another way, and compares with its requests one at a time, with
whole prompts and no cache. float32, so that rounding in batches of other shapes cannot change a
choice.
"""

import functools
import random
from collections.abc import Callable, Sequence
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

COLD: dict[str, dict[str, Any]] = {
    "batches of 2": {"max_num_seqs": 2},
    "batches of 5": {"max_num_seqs": 5},
    "batches of 64": {"max_num_seqs": 64},
    "chunks of 1": {"max_num_batched_tokens": 1},
    "blocks of 1": {"kvcache_block_size": 1},
    "blocks of 3": {"kvcache_block_size": 3},
    "blocks of 256": {"kvcache_block_size": 256},
    "blocks of 1, no prefix cache": {"kvcache_block_size": 1, "enable_prefix_caching": False},
    "blocks of 16, no prefix cache": {"kvcache_block_size": 16, "enable_prefix_caching": False},
}
"""Options under which the workload is generated once."""

WARM: dict[str, dict[str, Any]] = {
    "whole prompts": {},
    "chunks of 1": {"max_num_batched_tokens": 1},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "chunks of 33": {"max_num_batched_tokens": 33},
}
"""Options under which it is generated twice: the second time, prompts hit the prefix cache."""


def each_model(
    options: dict[str, Any], few: list[str], some: list[str] | None = None
) -> pytest.MarkDecorator:
    """Parametrize a test by workload and options: "parameters" has `some` of them, all if that is
    None, and the others have only `few`.
    """
    of_parameters = options if some is None or EVERY_CASE else some
    cases = [
        pytest.param(name, options[way], id=f"{name}-{way}")
        for name in ("parameters", *FAMILIES, "glossary")
        for way in (options if EVERY_CASE else of_parameters if name == "parameters" else few)
        if name != "qwen3" or EVERY_CASE  # the model of "parameters"
    ]
    return pytest.mark.parametrize(("workload", "options"), cases, indirect=["workload"])


PREEMPTING: dict[str, Any] = {"kvcache_block_size": 4, "num_kvcache_blocks": 64}
"""A pool for one sequence of 256 tokens, or for a few of the usual length."""

CACHES: dict[str, dict[str, Any]] = {
    "prefix cache": {"enable_prefix_caching": True},
    "no prefix cache": {"enable_prefix_caching": False},
}

ARRIVALS = {
    f"queue of {depth}": {"seed": seed, "queue_depth": depth}
    for seed, depth in enumerate((0, 1, 4))
}
"""Seeds of the order of arrival, and steps in flight."""

RANKS = [("parameters", 2), ("parameters", 4), ("llama", 2)]
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


@each_model(
    COLD,
    few=["batches of 5"],
    some=["batches of 2", "batches of 64", "chunks of 1", "blocks of 3"],
)
def test_outputs_do_not_depend_on_the_options(check: Any, options: dict[str, Any]) -> None:
    num = 10 if options == COLD["chunks of 1"] else None  # a step for each token
    check(num, **options)


@each_model(WARM, few=["chunks of 7"], some=["whole prompts", "chunks of 7"])
def test_outputs_do_not_depend_on_a_warm_prefix_cache(check: Any, options: dict[str, Any]) -> None:
    num = 10 if options == WARM["chunks of 1"] else None  # a step for each token
    check(num, warm=True, kvcache_block_size=4, **options)


@each_model(CACHES, few=["prefix cache"])
def test_outputs_do_not_depend_on_preemption(
    check: Any, preempted: list[Any], options: dict[str, Any]
) -> None:
    check(**options, **PREEMPTING, max_model_len=256)
    assert preempted


@pytest.mark.parametrize("workload", ["parameters", "glossary"], indirect=True)
def test_outputs_do_not_depend_on_tiers_below_the_pool(
    check: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("nanovllm.features.tiers.traffic.TierTraffic.pays", lambda self, *_: True)
    tiers = {"kv_offload_gib": 0.02, "kv_cache_dir": tmp_path}
    options = {**PREEMPTING, "max_model_len": 256, **tiers}
    check(warm=True, **options)
    check(**options)  # another engine, the same directory


@pytest.mark.parametrize("workload", ["parameters", "glossary"], indirect=True)
def test_outputs_do_not_depend_on_hash_collisions(
    check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanovllm.kv.trie.xxh3_128_digest", lambda data: b"42")
    check(kvcache_block_size=4)


@each_model(ARRIVALS, few=["queue of 1"])
def test_outputs_do_not_depend_on_arrival_and_priority(
    workload: Workload, options: dict[str, Any]
) -> None:
    """Requests arrive in random order, with random priorities; some are aborted and come again."""
    kept = {**workload.options, **PREEMPTING, "max_model_len": 256}
    config = Config(model=workload.model, max_num_seqs=8, max_num_batched_tokens=24, **kept)
    engine = make_engine(config, queue_depth=options["queue_depth"])
    outputs = generate_in_random_order(engine, workload.requests, options["seed"])
    engine.shutdown()
    assert_same_outputs(outputs, workload.expected)


@pytest.mark.parametrize(("workload", "num_ranks"), RANKS, indirect=["workload"])
def test_outputs_do_not_depend_on_tensor_parallelism(
    workload: Workload, tensor_parallel_llm: Any, num_ranks: int
) -> None:
    llm = tensor_parallel_llm(workload.model, num_ranks)
    assert_same_outputs(generate_all(llm, workload.requests), workload.expected)
    assert_idle(llm)
