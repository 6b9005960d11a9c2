"""The tokens of a request depend on the request alone: not on what runs beside it, nor on how.

float32, so that the sums of different batch shapes cannot tip a greedy choice.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams, demo_model
from nanovllm.config import Config
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.scheduler.scheduler import Scheduler

Workload = tuple[str, list[Any], list[SamplingParams]]
Tokens = list[list[int]]


@pytest.fixture(scope="module")
def random_workload(random_model: str) -> Workload:
    """64 prompts of 1 to 30 tokens, many begin alike; greedy and seeded sampling in turn."""
    rng = random.Random(0)
    shared = [rng.randrange(1003) for _ in range(24)]
    prompts = []
    for index in range(64):
        start = shared[: rng.choice([0, 0, 4, 16, 24])]
        prompts.append(
            start + [rng.randrange(1003) for _ in range(rng.randint(1, 30 - len(start)))]
        )
        if index % 9 == 8:
            prompts[-1] = list(prompts[-2])
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=rng.randint(1, 14))
        for i in range(64)
    ]
    return random_model, prompts, params


@pytest.fixture(scope="module")
def glossary_workload() -> Workload:
    prompts = [question for question, _ in demo_model.entries()][:32]
    return demo_model.MODEL, prompts, [SamplingParams(temperature=0, max_tokens=96)] * len(prompts)


@pytest.fixture(scope="module", params=["random", "glossary"])
def workload(request: pytest.FixtureRequest) -> Workload:
    found: Workload = request.getfixturevalue(f"{request.param}_workload")
    return found


def options_for(model: str) -> dict[str, Any]:
    return {"dtype": "float32", "max_model_len": 64 if model != demo_model.MODEL else 256}


@pytest.fixture(scope="module")
def expected(workload: Workload) -> Tokens:
    """One request at a time, whole prompts, no cache."""
    model, prompts, params = workload
    llm = LLM(model, max_num_seqs=1, enable_prefix_caching=False, **options_for(model))
    return [
        llm.generate([prompt], param, use_tqdm=False)[0].token_ids
        for prompt, param in zip(prompts, params, strict=True)
    ]


@pytest.fixture
def generate(workload: Workload) -> Callable[..., Tokens]:
    """Generate the workload with the given options, twice if `warm`; nothing is left behind."""

    def run(warm: bool = False, **options: Any) -> Tokens:
        model, prompts, params = workload
        llm = LLM(model, **{**options_for(model), **options})
        try:
            for _ in range(1 + warm):
                outputs = llm.generate(prompts, params, use_tqdm=False)
            scheduler = llm.engine.scheduler
            scheduler.check()
            assert scheduler.block_manager.num_free_blocks == llm.engine.cache_info.num_blocks
            if warm:
                assert sum(output.num_cached_tokens for output in outputs) > 100
            return [output.token_ids for output in outputs]
        finally:
            llm.shutdown()

    return run


@pytest.mark.parametrize("max_num_seqs", [1, 2, 5, 64])
def test_batch_size(generate: Any, expected: Tokens, max_num_seqs: int) -> None:
    assert generate(max_num_seqs=max_num_seqs) == expected


@pytest.mark.parametrize("max_num_batched_tokens", [1, 2, 7, 33])
def test_chunk_size(generate: Any, expected: Tokens, max_num_batched_tokens: int) -> None:
    options = {"max_num_batched_tokens": max_num_batched_tokens, "kvcache_block_size": 4}
    assert generate(warm=True, **options) == expected


@pytest.mark.parametrize("kvcache_block_size", [1, 3, 16, 256])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_block_size_and_prefix_cache(
    generate: Any, expected: Tokens, kvcache_block_size: int, enable_prefix_caching: bool
) -> None:
    options = {
        "kvcache_block_size": kvcache_block_size,
        "enable_prefix_caching": enable_prefix_caching,
    }
    assert generate(**options) == expected


def test_warm_prefix_cache(generate: Any, expected: Tokens) -> None:
    assert generate(warm=True, kvcache_block_size=4) == expected


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_pool_so_small_that_it_preempts(
    generate: Any, expected: Tokens, enable_prefix_caching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    preempted = []
    preempt = Scheduler._preempt
    monkeypatch.setattr(
        Scheduler, "_preempt", lambda self, seq: (preempted.append(seq.seq_id), preempt(self, seq))
    )
    blocks = 64  # of 4 tokens: one sequence of the longest, or a few of the usual
    options = {"kvcache_block_size": 4, "num_kvcache_blocks": blocks, "max_model_len": 4 * blocks}
    assert generate(enable_prefix_caching=enable_prefix_caching, **options) == expected
    assert preempted


def test_forced_hash_collision(
    generate: Any, expected: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanovllm.scheduler.block_manager.xxh64_intdigest", lambda data: 42)
    assert generate(kvcache_block_size=4) == expected


@pytest.mark.parametrize(("seed", "queue_depth"), [(0, 0), (1, 1), (2, 4)])
def test_priorities_and_arrival_order(
    workload: Workload, expected: Tokens, seed: int, queue_depth: int
) -> None:
    """Requests arrive in any order while others run, with random priorities; some are aborted."""
    model, prompts, params = workload
    rng = random.Random(seed)
    config = Config(
        model=model,
        max_num_seqs=8,
        max_num_batched_tokens=24,
        kvcache_block_size=4,
        num_kvcache_blocks=64,
        **{**options_for(model), "max_model_len": 256},
    )
    engine = LLMEngine(config, queue_depth=queue_depth)
    waiting = rng.sample(range(len(prompts)), len(prompts))
    index_of: dict[int, int] = {}
    found: dict[int, list[int]] = {}
    while waiting or not engine.is_finished():
        for _ in range(min(len(waiting), rng.choice([0, 0, 1, 8]))):
            index = waiting.pop()
            request = engine.add_request(prompts[index], params[index], priority=rng.randint(-1, 1))
            index_of[request] = index
        if rng.random() < 0.05:
            aborted = rng.choice([*index_of, 0])
            if aborted in index_of and engine.abort(aborted) is not None:
                waiting.append(index_of.pop(aborted))
        for output in engine.step():
            found[index_of[output.request_id]] = output.token_ids
        engine.scheduler.check()
    assert [found[index] for index in range(len(prompts))] == expected


@pytest.mark.parametrize("tensor_parallel_size", [2, 4])
def test_tensor_parallel(generate: Any, expected: Tokens, tensor_parallel_size: int) -> None:
    options = {"kvcache_block_size": 4, "num_kvcache_blocks": 100, "max_num_batched_tokens": 64}
    assert generate(tensor_parallel_size=tensor_parallel_size, **options) == expected
