"""A model of full and latent attention, windows and states, in bits: see test_invariance.py.

tests/mixture.py has the model, and what it computes in float64.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.factory import make_engine
from nanovllm.kernels.cpu.library import library
from nanovllm.options.config import Config
from nanovllm.options.lora_request import LoRARequest
from nanovllm.outputs import RequestOutput
from tests import mixture
from tests.helpers import (
    Request,
    assert_idle,
    generate_all,
    generate_in_random_order,
    random_prompt,
)
from tests.lora.adapters import linears_of, write_adapter
from tests.speculation.proposers.drafting import allow_all

native = pytest.mark.skipif(library() is None, reason="no compiler here")

OPTIONS: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 256, "kvcache_block_size": 32}
"""Of the C kernels, whose rows have the same bits in each batch."""
FEW_PAGES = 50
"""A pool for one sequence of 256 tokens, or for a few of the usual length."""
ADAPTED = ("in_proj", "out_proj", "in_proj_qkv", "q_proj", "v_proj", "o_proj", "down_proj")

Bits = list[tuple[list[int], Any]]
"""Of each request: its tokens, and their log-probabilities."""


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    with mixture.registered():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return mixture.make_checkpoint(tmp_path_factory.mktemp("mixture"))


def make_requests() -> list[Request]:
    """Prompts of 1 to 190 tokens, many with a shared prefix; greedy and seeded in turn.

    Of some few tokens may be chosen, so that n-grams repeat and drafts are accepted.
    """
    rng = random.Random(0)
    shared = random_prompt(rng, 160)
    requests: list[Request] = []
    for index in range(20):
        start = shared[: rng.choice([0, 7, 33, 64, 100, 160])]
        prompt = start + random_prompt(rng, rng.randint(1, 30))
        if index % 9 == 8:
            prompt = list(requests[-1][0])
        params = SamplingParams(
            temperature=0.8 * (index % 2),
            seed=index,
            max_tokens=rng.randint(1, 40),
            ignore_eos=index % 3 > 0,
            allowed_token_ids=[5, 6, 7] if index % 4 == 1 else None,
            logprobs=2,
        )
        requests.append((prompt, params))
    return requests


REQUESTS = make_requests()


def bits_of(outputs: list[RequestOutput]) -> Bits:
    return [(output.token_ids, output.outputs[0].logprobs) for output in outputs]


def one_by_one(model: str, requests: list[Request], **options: Any) -> Bits:
    """Generate one request at a time, whole prompts, no cache."""
    llm = LLM(model, **OPTIONS, enable_prefix_caching=False, max_num_seqs=1, **options)
    outputs = [generate_all(llm, [request])[0] for request in requests]
    llm.shutdown()
    return bits_of(outputs)


@pytest.fixture(scope="module")
def expected(model: str, registered: None) -> Bits:
    return one_by_one(model, REQUESTS)


def assert_same(found: Bits, expected: Bits) -> None:
    for index, (own, other) in enumerate(zip(found, expected, strict=True)):
        assert own == other, f"request {index}"


@pytest.mark.thinned(2)
@native
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enforce_eager": True},
        {"max_num_seqs": 3, "enable_prefix_caching": False},
        {"kvcache_block_size": 64},
        {"max_num_seqs": 5, "max_num_batched_tokens": 70},
        {"max_num_batched_tokens": 131, "max_num_seqs": 64},
        {"max_num_seqs": 8, "num_kvcache_blocks": FEW_PAGES},
    ],
    ids=str,
)
def test_bits_do_not_depend_on_how_the_work_is_cut(
    model: str,
    make_llm: Any,
    expected: Bits,
    preempted: list[tuple[int, int]],
    options: dict[str, Any],
) -> None:
    """Batches, chunks, blocks, hits of the prefix cache, and preemption."""
    llm = make_llm(model, **{**OPTIONS, **options})
    assert_same(bits_of(generate_all(llm, REQUESTS)), expected)
    again = generate_all(llm, REQUESTS)
    assert_same(bits_of(again), expected)
    if not options:
        assert sum(output.num_cached_tokens for output in again) > 600
    assert bool(preempted) == ("num_kvcache_blocks" in options)
    assert_idle(llm)


@native
@pytest.mark.parametrize("queue_depth", [0, 1, 4])
def test_bits_do_not_depend_on_arrival_and_overlap(
    model: str, expected: Bits, preempted: list[tuple[int, int]], queue_depth: int
) -> None:
    """Requests come in random order, some are aborted, and the pool preempts."""
    options = {**OPTIONS, "num_kvcache_blocks": FEW_PAGES}
    config = Config(model, max_num_seqs=8, max_num_batched_tokens=90, **options)
    engine = make_engine(config, queue_depth=queue_depth)
    try:
        outputs = generate_in_random_order(engine, REQUESTS, seed=queue_depth)
    finally:
        engine.shutdown()
    assert_same(bits_of(outputs), expected)
    assert preempted


@native
@pytest.mark.parametrize("pages", [FEW_PAGES, 2000])
def test_bits_do_not_depend_on_speculation(
    model: str, make_llm: Any, expected: Bits, monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    allow_all(monkeypatch)
    spec = {"method": "ngram", "num_speculative_tokens": 3}
    llm = make_llm(model, **OPTIONS, speculative_config=spec, num_kvcache_blocks=pages)
    for _ in range(2):
        assert_same(bits_of(generate_all(llm, REQUESTS)), expected)
    counts = llm.engine.scheduler.drafting.counts
    assert 20 < counts.num_accepted_tokens < counts.num_draft_tokens - 20
    assert_idle(llm)


@native
def test_bits_do_not_depend_on_tiers(
    model: str, make_llm: Any, expected: Bits, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("nanovllm.features.tiers.traffic.TierTraffic.pays", lambda self, *_: True)
    monkeypatch.setattr("nanovllm.features.tiers.page_transfers._CLOSE_SECONDS", 60.0)
    options = {**OPTIONS, "num_kvcache_blocks": FEW_PAGES, "max_num_seqs": 4}
    # A page that is reused before it is written is never written. A request alone reuses none.
    index, request = max(enumerate(REQUESTS), key=lambda item: len(item[1][0]))
    llm = make_llm(model, **options, kv_cache_dir=tmp_path)
    assert bits_of(generate_all(llm, [request])) == [expected[index]]
    llm.shutdown()  # writes the rest
    llm = make_llm(model, **options, kv_offload_gib=0.05, kv_cache_dir=tmp_path)
    assert bits_of(generate_all(llm, [request])) == [expected[index]]
    stats = llm.engine.scheduler.stats.tiers
    assert stats.num_store_tokens > 0
    for _ in range(2):
        assert_same(bits_of(generate_all(llm, REQUESTS)), expected)
    assert stats.num_host_tokens > 0
    assert_idle(llm)


@native
def test_bits_do_not_depend_on_others_adapters(
    model: str, make_llm: Any, expected: Bits, tmp_path: Path
) -> None:
    linears = linears_of(model, ADAPTED)
    assert {name.rpartition(".")[2] for name in linears} == set(ADAPTED)
    paths = [
        write_adapter(tmp_path / str(seed), linears, seed=seed, target_modules=list(ADAPTED))
        for seed in (1, 2, 3)
    ]
    adapters = [LoRARequest(f"a{id_}", id_, path) for id_, path in enumerate(paths, 1)]
    of_requests = [(None, *adapters)[index % 4] for index in range(len(REQUESTS))]
    prompts = [prompt for prompt, _ in REQUESTS]
    params = [params for _, params in REQUESTS]

    def generate(llm: LLM) -> Bits:
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=of_requests)
        return bits_of(outputs)

    lora = {"enable_lora": True, "max_loras": 2}
    alone = make_llm(model, **OPTIONS, **lora, max_num_seqs=1, enable_prefix_caching=False)
    own = generate(alone)
    for index, (found, plain) in enumerate(zip(own, expected, strict=True)):
        assert (found == plain) == (index % 4 == 0), index
    for options in ({}, {"max_num_seqs": 8, "num_kvcache_blocks": FEW_PAGES}):
        llm = make_llm(model, **OPTIONS, **lora, **options)
        for _ in range(2):
            assert_same(generate(llm), own)
        assert_idle(llm)


@pytest.mark.long
@native
def test_two_ranks(model: str, make_llm: Any, preempted: list[tuple[int, int]]) -> None:
    """Bits depend on the number of ranks, and on nothing else."""
    options = {"tensor_parallel_size": 2, "max_num_seqs": 8, "num_kvcache_blocks": FEW_PAGES}
    llm = make_llm(model, **OPTIONS, **options)
    own: Bits = []
    few = REQUESTS[:9]  # a step of two ranks takes long
    for request in few:
        own += bits_of(generate_all(llm, [request]))
        assert llm.reset_prefix_cache()
    for _ in range(2):
        assert_same(bits_of(generate_all(llm, few)), own)
    assert preempted


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_tokens_are_those_of_float64(model: str, make_llm: Any, ranks: int) -> None:
    """In chunks, with hits; the pool has few pages."""
    options = {"dtype": "float32", "max_model_len": 128, "kvcache_block_size": 4}
    llm = make_llm(
        model,
        **options,
        max_num_batched_tokens=24 * ranks,
        num_kvcache_blocks=400,
        tensor_parallel_size=ranks,
    )
    params = SamplingParams(temperature=0.0, max_tokens=12 // ranks, ignore_eos=True)
    prompts = [prompt[:100] for prompt, _ in REQUESTS[: 20 // ranks**2]]
    weights = mixture.read_weights(model)
    found = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]
    for prompt, *outputs in zip(prompts, *found, strict=True):
        for output in outputs:  # each token is the likeliest one after the tokens before it
            logits = mixture.logits(weights, prompt + output.token_ids)
            assert output.token_ids == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
            assert len(output.token_ids) == params.max_tokens
    assert sum(output.num_cached_tokens for output in found[1]) > 20 * len(prompts)
