"""Outputs do not depend on how the engine cuts up the work, with every kind of request.

The requests combine filters, rules, stop tokens, several continuations and log-probabilities.
float32, so that rounding in batches of other shapes cannot change a choice.
"""

import random
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.factory import make_engine
from nanovllm.options.config import Config
from nanovllm.outputs import RequestOutput
from nanovllm.testing.invariants import check_scheduler
from tests.helpers import VOCAB, Request, generate_all, generate_in_random_order, random_prompt

CLOSE = 1e-4
OPTIONS = {"dtype": "float32", "max_model_len": 48}


@pytest.fixture
def llm(random_llm: LLM) -> LLM:
    return random_llm


def make_requests() -> list[Request]:
    """Return 40 requests that combine filters, rules, ends, n and log-probabilities.

    Prompts have 1 to 24 tokens; many share a prefix.
    """
    chooser = random.Random(5)
    shared = random_prompt(chooser, 20)
    asked: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "top_k": 20},
        {"top_p": 0.7},
        {"temperature": 1.5, "min_p": 0.1},
        {"top_k": 30, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 0, "repetition_penalty": 1.4, "logit_bias": {7: 3.0, 11: 3.0}},
        {"frequency_penalty": 0.9, "presence_penalty": 0.6, "top_k": 50},
        {"logit_bias": {7: 6.0, 50: 8.0, 60: -100.0}, "temperature": 2.0},
        {"allowed_token_ids": list(range(0, VOCAB, 40)), "top_p": 0.95, "frequency_penalty": -0.5},
        {"min_tokens": 4, "stop_token_ids": list(range(0, VOCAB, 3)), "temperature": 1.2},
    ]
    requests = []
    for index in range(40):
        start = shared[: chooser.choice([0, 4, 16, 20])]
        prompt = start + random_prompt(chooser, chooser.randint(1, 24 - len(start)))
        if index % 8 == 7:
            prompt = list(requests[-1][0])
        options = {"max_tokens": chooser.randint(4, 10), **asked[index % 10]}
        if index % 4 == 1:
            options.setdefault("stop_token_ids", chooser.sample(range(VOCAB), 150))
        params = SamplingParams(
            seed=1000 * index,
            n=(1, 2, 1, 3, 1)[index % 5] if index < 30 else 1 + index % 3,
            logprobs=(None, 2, None, 0)[index % 4],
            prompt_logprobs=3 if index % 6 == 5 else None,
            ignore_eos=index % 7 == 3,
            **options,
        )
        requests.append((prompt, params))
    return requests


REQUESTS = make_requests()


def choices(outputs: list[RequestOutput]) -> list[Any]:
    """Return the tokens and finish reasons of all continuations."""
    return [
        [(c.index, c.token_ids, c.finish_reason, c.stop_reason) for c in output.outputs]
        for output in outputs
    ]


def numbers(outputs: list[RequestOutput]) -> list[float]:
    """Return all log-probabilities, also the cumulative ones, in order."""
    found: list[float] = []
    for output in outputs:
        for entries in (output.prompt_logprobs or [])[1:]:
            assert entries is not None
            found += [entry.logprob for entry in entries.values()]
        for completion in output.outputs:
            for entries in completion.logprobs or ():
                found += [entry.logprob for entry in entries.values()]
            if completion.cumulative_logprob is not None:
                found.append(completion.cumulative_logprob)
    return found


def assert_same(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    assert choices(found) == choices(expected)
    assert numbers(found) == pytest.approx(numbers(expected), abs=CLOSE, rel=0)


@pytest.fixture(scope="module")
def expected(random_model: str) -> list[RequestOutput]:
    """The outputs of one request at a time, whole prompts, no cache."""
    alone = LLM(random_model, max_num_seqs=1, enable_prefix_caching=False, **OPTIONS)
    outputs = [output for request in REQUESTS for output in generate_all(alone, [request])]
    alone.shutdown()
    return outputs


def test_the_workload_ends_in_every_way(expected: list[RequestOutput]) -> None:
    """The workload has every kind of end, and outputs that differ."""
    completions = [c for output in expected for c in output.outputs]
    ends = {(c.finish_reason, type(c.stop_reason)) for c in completions}
    assert ends == {("stop", int), ("stop", type(None)), ("length", type(None))}
    assert {len(output.outputs) for output in expected} == {1, 2, 3}
    assert len({tuple(c.token_ids) for c in completions}) > 0.8 * len(completions)
    assert len(numbers(expected)) > 500
    for (_, params), output in zip(REQUESTS, expected, strict=True):
        for completion in output.outputs:
            tokens = completion.token_ids
            if params.allowed_token_ids is not None:
                assert set(tokens) <= set(params.allowed_token_ids)
            if completion.finish_reason == "stop":
                assert len(tokens) > params.min_tokens


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 2},
        {"max_num_seqs": 64},
        {"max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 7},
        {"kvcache_block_size": 1},
        {"kvcache_block_size": 4},
        {"kvcache_block_size": 16},
        {"kvcache_block_size": 1, "enable_prefix_caching": False},
        {"kvcache_block_size": 4, "enable_prefix_caching": False},
        {"kvcache_block_size": 16, "enable_prefix_caching": False},
    ],
    ids=str,
)
def test_outputs_do_not_depend_on_how_the_work_is_cut(
    make_llm: Any, random_model: str, expected: list[RequestOutput], options: dict[str, Any]
) -> None:
    assert_same(generate_all(make_llm(random_model, **OPTIONS, **options), REQUESTS), expected)


@pytest.mark.parametrize("max_num_batched_tokens", [16384, 5])
def test_outputs_do_not_depend_on_a_warm_cache(
    make_llm: Any, random_model: str, expected: list[RequestOutput], max_num_batched_tokens: int
) -> None:
    llm = make_llm(
        random_model,
        **OPTIONS,
        kvcache_block_size=4,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    generate_all(llm, REQUESTS)
    outputs = generate_all(llm, REQUESTS)
    assert sum(output.num_cached_tokens for output in outputs) > 200
    assert_same(outputs, expected)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_outputs_do_not_depend_on_preemption(
    make_llm: Any,
    random_model: str,
    expected: list[RequestOutput],
    preempted: list[tuple[int, int]],
    enable_prefix_caching: bool,
) -> None:
    llm = make_llm(
        random_model,
        **OPTIONS,
        kvcache_block_size=4,
        num_kvcache_blocks=12,  # one sequence of max_model_len
        enable_prefix_caching=enable_prefix_caching,
    )
    assert_same(generate_all(llm, REQUESTS), expected)
    assert len(preempted) > 10
    assert any(num_output_tokens > 0 for _, num_output_tokens in preempted)


@pytest.mark.parametrize(("seed", "queue_depth"), [(0, 0), (1, 1), (2, 3)])
def test_outputs_do_not_depend_on_arrival_and_priority(
    random_model: str,
    expected: list[RequestOutput],
    preempted: list[tuple[int, int]],
    seed: int,
    queue_depth: int,
) -> None:
    """Requests arrive in random order, with random priorities, in a pool that preempts."""
    config = Config(
        model=random_model,
        max_num_seqs=6,
        max_num_batched_tokens=20,
        kvcache_block_size=4,
        num_kvcache_blocks=16,
        **OPTIONS,
    )
    engine = make_engine(config, queue_depth=queue_depth)
    outputs = generate_in_random_order(engine, REQUESTS, seed)
    engine.shutdown()
    assert preempted
    assert_same(outputs, expected)


def test_outputs_do_not_depend_on_tensor_parallelism(
    tensor_parallel_llm: Any, random_model: str, expected: list[RequestOutput]
) -> None:
    assert_same(generate_all(tensor_parallel_llm(random_model, 2), REQUESTS), expected)


@pytest.mark.parametrize("prompt_logprobs", [None, 1])
@pytest.mark.parametrize(("enable_prefix_caching", "most_blocks"), [(True, 8 + 4), (False, 4 * 9)])
def test_continuations_share_the_blocks_of_the_prompt(
    random_model: str, enable_prefix_caching: bool, most_blocks: int, prompt_logprobs: int | None
) -> None:
    """The prompt fills 8 blocks; each continuation has one block of its own."""
    config = Config(
        model=random_model,
        kvcache_block_size=4,
        enable_prefix_caching=enable_prefix_caching,
        **OPTIONS,
    )
    engine = make_engine(config)
    prompt = random_prompt(random.Random(6), 33)
    params = SamplingParams(
        n=4, seed=1, max_tokens=3, ignore_eos=True, prompt_logprobs=prompt_logprobs
    )
    engine.add_request(prompt, params)
    manager = engine.scheduler.block_manager
    used = []
    outputs: list[RequestOutput] = []
    while not engine.is_finished():
        outputs += engine.step()
        used.append(engine.worker_info.num_blocks - manager.num_free_blocks)
        check_scheduler(engine.scheduler)
    engine.shutdown()
    assert max(used) == most_blocks
    assert used[-1] == 0
    assert [c.index for c in outputs[0].outputs] == [0, 1, 2, 3]
    assert engine.stats.num_decode_tokens == 12


@pytest.mark.parametrize("seed", [100, 2**63 - 2])
def test_each_continuation_has_the_next_seed(llm: LLM, seed: int) -> None:
    prompt = random_prompt(random.Random(6), 9)
    options: dict[str, Any] = {"max_tokens": 8, "top_p": 0.95, "presence_penalty": 0.5}
    (output,) = generate_all(llm, [(prompt, SamplingParams(n=4, seed=seed, **options))])
    seeds = [(seed + index + 2**63) % 2**64 - 2**63 for index in range(4)]  # of 64 bits
    alone = generate_all(llm, [(prompt, SamplingParams(seed=s, **options)) for s in seeds])
    assert [c.token_ids for c in output.outputs] == [o.token_ids for o in alone]
    assert len({tuple(c.token_ids) for c in output.outputs}) == 4


def test_continuations_without_a_seed_differ(llm: LLM) -> None:
    (output,) = generate_all(llm, [([1, 2], SamplingParams(n=5, max_tokens=8, ignore_eos=True))])
    assert len({tuple(c.token_ids) for c in output.outputs}) == 5
