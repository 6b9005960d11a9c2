"""The promise: the tokens of a request depend on nothing but the request.

Each test generates one workload in another way, and compares with `expected`: one request at a
time, whole prompts, no cache. float32, so that rounding in batches of other shapes cannot change a
choice.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nanovllm import LLM, SamplingParams, demo_model
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
    generate_all,
    generate_in_random_order,
    random_prompt,
    token_ids,
)

COLD: dict[str, dict[str, Any]] = {
    "batches of 2": {"max_num_seqs": 2},
    "batches of 5": {"max_num_seqs": 5},
    "batches of 64": {"max_num_seqs": 64},
    "blocks of 1": {"kvcache_block_size": 1},
    "blocks of 3": {"kvcache_block_size": 3},
    "blocks of 16": {"kvcache_block_size": 16},
    "blocks of 256": {"kvcache_block_size": 256},
    "blocks of 1, no prefix cache": {"kvcache_block_size": 1, "enable_prefix_caching": False},
    "blocks of 3, no prefix cache": {"kvcache_block_size": 3, "enable_prefix_caching": False},
    "blocks of 16, no prefix cache": {"kvcache_block_size": 16, "enable_prefix_caching": False},
    "blocks of 256, no prefix cache": {"kvcache_block_size": 256, "enable_prefix_caching": False},
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
    """Parametrize a test by workload and options; models other than qwen3 have only `few`.

    qwen3 has `some` of them, all if that is None.
    """
    of_qwen3 = options if some is None or EVERY_CASE else some
    cases = [
        pytest.param(model, options[name], id=f"{model}-{name}")
        for model in (*FAMILIES, "glossary")
        for name in (options if EVERY_CASE else of_qwen3 if model == "qwen3" else few)
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

Tokens = list[list[int]]


RANKS = {"qwen3": 4, "llama": 2}
"""Tensor-parallel sizes. The random models have 2 KV heads, so 4 ranks need copies of them; llama
has all biases. test_generation.py has qwen3 on 2 ranks, test_structured_outputs.py the demo model.
"""


class Workload(NamedTuple):
    model: str
    options: dict[str, Any]
    requests: list[Request]


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
    """Questions to the demo model, a trained one; every sixth is answered in JSON."""
    params = SamplingParams(temperature=0, max_tokens=96)
    in_json = params.clone(structured_outputs=COMPACT, temperature=1.0, seed=7)
    options = {"dtype": "float32", "max_model_len": 256}
    requests: list[Request] = [
        (question, in_json if HAS_GRAMMARS and index % 6 == 0 else params)
        for index, question in enumerate(QUESTIONS[: 12 if EVERY_CASE else 9])
    ]
    return Workload(demo_model.MODEL, options, requests)


@pytest.fixture(scope="module", params=[*FAMILIES, "glossary"])
def workload(request: pytest.FixtureRequest, shared_checkpoint: Callable[..., str]) -> Workload:
    if request.param == "glossary":
        return glossary_workload()
    model = shared_checkpoint(**FAMILIES[request.param])
    return random_workload(model, num_requests=40 if EVERY_CASE else 24)


@pytest.fixture(scope="module")
def expected(workload: Workload) -> Tokens:
    """The tokens of each request: one at a time, whole prompts, no cache."""
    llm = LLM(workload.model, max_num_seqs=1, enable_prefix_caching=False, **workload.options)
    outputs = [generate_all(llm, [request])[0] for request in workload.requests]
    llm.shutdown()
    return token_ids(outputs)


@pytest.fixture
def generate(workload: Workload, make_llm: Any) -> Callable[..., Tokens]:
    """Generate the first `num` requests under the given options, twice if `warm`."""

    def run(num: int | None = None, *, warm: bool = False, **options: Any) -> Tokens:
        llm = make_llm(workload.model, **{**workload.options, **options})
        requests = workload.requests[:num]
        outputs = generate_all(llm, requests)
        if warm:
            outputs = generate_all(llm, requests)
            assert sum(output.num_cached_tokens for output in outputs) > 2 * len(requests)
        assert_idle(llm)
        return token_ids(outputs)

    return run


@each_model(
    COLD,
    few=["batches of 5"],
    some=["batches of 2", "batches of 64", "blocks of 3", "blocks of 1, no prefix cache"],
)
def test_tokens_do_not_depend_on_the_options(
    generate: Any, expected: Tokens, options: dict[str, Any]
) -> None:
    assert generate(**options) == expected


@each_model(WARM, few=["chunks of 7"], some=["whole prompts", "chunks of 1"])
def test_tokens_do_not_depend_on_a_warm_prefix_cache(
    generate: Any, expected: Tokens, options: dict[str, Any]
) -> None:
    num = 10 if options == WARM["chunks of 1"] else len(expected)  # a step for each token
    assert generate(num, warm=True, kvcache_block_size=4, **options) == expected[:num]


@each_model(CACHES, few=["prefix cache"])
def test_tokens_do_not_depend_on_preemption(
    generate: Any, expected: Tokens, preempted: list[Any], options: dict[str, Any]
) -> None:
    assert generate(**options, **PREEMPTING, max_model_len=256) == expected
    assert preempted


@pytest.mark.parametrize("workload", ["qwen3", "glossary"], indirect=True)
def test_tokens_do_not_depend_on_tiers_below_the_pool(
    generate: Any, expected: Tokens, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("nanovllm.features.tiers.traffic.TierTraffic.pays", lambda self, *_: True)
    tiers = {"kv_offload_gib": 0.02, "kv_cache_dir": tmp_path}
    options = {**PREEMPTING, "max_model_len": 256, **tiers}
    assert generate(warm=True, **options) == expected
    assert generate(**options) == expected  # another engine, the same directory


@pytest.mark.parametrize("workload", ["qwen3", "glossary"], indirect=True)
def test_tokens_do_not_depend_on_hash_collisions(
    generate: Any, expected: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanovllm.kv.trie.xxh3_128_digest", lambda data: b"42")
    assert generate(kvcache_block_size=4) == expected


@each_model(ARRIVALS, few=["queue of 1"])
def test_tokens_do_not_depend_on_arrival_and_priority(
    workload: Workload, expected: Tokens, options: dict[str, Any]
) -> None:
    """Requests arrive in random order, with random priorities; some are aborted and come again."""
    kept = {**workload.options, **PREEMPTING, "max_model_len": 256}
    config = Config(model=workload.model, max_num_seqs=8, max_num_batched_tokens=24, **kept)
    engine = make_engine(config, queue_depth=options["queue_depth"])
    outputs = generate_in_random_order(engine, workload.requests, options["seed"])
    engine.shutdown()
    assert token_ids(outputs) == expected


@pytest.mark.parametrize(("workload", "num_ranks"), RANKS.items(), indirect=["workload"])
def test_tokens_do_not_depend_on_tensor_parallelism(
    workload: Workload, expected: Tokens, tensor_parallel_llm: Any, num_ranks: int
) -> None:
    llm = tensor_parallel_llm(workload.model, num_ranks)
    assert token_ids(generate_all(llm, workload.requests)) == expected
    assert_idle(llm)
