"""NaN and infinities end the request that has them, and reach no other request: neither through the
batch, nor through the prefix cache, nor through a KV block that another sequence had before.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm import LLM, AsyncLLM, Config, RequestOutput, SamplingParams
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.factory import make_engine
from nanovllm.kernels.cpu.library import library
from nanovllm.testing.invariants import check_scheduler
from tests.checkpoints import copy_checkpoint
from tests.graphs.fake_graphs import use_fake_graphs
from tests.helpers import Request, assert_idle, generate, join, random_prompt, token_ids

NATIVE = pytest.mark.skipif(library() is None, reason="no compiler here")
MODEL: dict[str, Any] = {"head_dim": 32, "max_position_embeddings": 128}
OPTIONS: dict[str, Any] = {"device": "cpu", "max_model_len": 128, "max_num_batched_tokens": 40}
POISON = 500
"""The token whose embedding is NaN."""
CPU_KINDS = [
    pytest.param({"dtype": "float32", "kvcache_block_size": 16}, id="torch"),
    pytest.param({"dtype": "bfloat16"}, id="cpu", marks=NATIVE),
    pytest.param({"dtype": "bfloat16", "kv_cache_dtype": "int8"}, id="cpu-int8", marks=NATIVE),
    pytest.param({"dtype": "bfloat16", "kv_cache_dtype": "int4"}, id="cpu-int4", marks=NATIVE),
]


@pytest.fixture(scope="module")
def model(shared_checkpoint: Callable[..., str]) -> str:
    return shared_checkpoint(**MODEL)


@pytest.fixture(scope="module")
def poisoned(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that is sound but for one token: prompts with POISON give NaN logits."""
    path = tmp_path_factory.mktemp("poisoned")
    copy_checkpoint(model, path)
    tensors = load_file(Path(model) / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(tensors, path / "model.safetensors")
    return str(path)


@pytest.fixture(scope="module")
def poisoned_llm(poisoned: str) -> Iterator[LLM]:
    llm = LLM(poisoned, dtype="float32", kvcache_block_size=4, **OPTIONS)
    yield llm
    llm.shutdown()


def sound_prompt(seed: int, length: int) -> list[int]:
    return [token for token in random_prompt(random.Random(seed), length) if token != POISON]


def run(engine: LLMEngine, requests: list[Request]) -> list[RequestOutput]:
    ids = [engine.add_request(*request) for request in requests]
    found: dict[int, RequestOutput] = {}
    while not engine.is_finished():
        found.update((output.request_id, output) for output in engine.step())
        check_scheduler(engine.scheduler)
    return [found[request_id] for request_id in ids]


def assert_failed(output: RequestOutput, num_tokens: int = 0) -> None:
    assert output.finished
    for completion in output.outputs:
        assert completion.finish_reason == "error"
        assert str(completion.stop_reason).startswith("no token can be chosen: the logits have NaN")
        assert len(completion.token_ids) == num_tokens


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 1.0, "repetition_penalty": 1.2, "n": 2},
]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("queue_depth", [0, 1])
@pytest.mark.parametrize("options", CPU_KINDS)
def test_nan_ends_its_request_only(poisoned: str, options: Any, queue_depth: int) -> None:
    """Symptom: a request with NaN logits babbles to max_tokens."""
    requests: list[Request] = []
    for index, kind in enumerate(KINDS):
        params = SamplingParams(seed=index, max_tokens=6, ignore_eos=True, **kind)
        prompt = sound_prompt(index, 12 + 7 * index)
        requests += [(prompt, params), ([*prompt, POISON, 3], params)]
    engine = make_engine(Config(model=poisoned, **OPTIONS, **options), queue_depth=queue_depth)
    try:
        alone = run(engine, requests[::2])
        together = run(engine, requests)
    finally:
        engine.shutdown()
    for output in together[1::2]:
        assert_failed(output)
    assert token_ids(together[::2]) == token_ids(alone)
    assert all(output.finish_reason == "length" for output in together[::2])


def test_nan_in_a_replayed_graph_ends_its_request_only(
    poisoned: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step is launched before the host knows: it must not look up token -1."""
    use_fake_graphs(monkeypatch)
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    to_poison = SamplingParams(max_tokens=8, allowed_token_ids=[POISON], ignore_eos=True)
    config = Config(
        model=poisoned, dtype="float32", kvcache_block_size=4, num_kvcache_blocks=50, **OPTIONS
    )
    engine = make_engine(config, queue_depth=1)
    try:
        (alone,) = run(engine, [([1, 2, 3], greedy)])
        failed, beside = run(engine, [([4, 5], to_poison), ([1, 2, 3], greedy)])
    finally:
        engine.shutdown()
    assert_failed(failed, num_tokens=1)  # POISON itself, whose KV is NaN
    assert beside.token_ids == alone.token_ids


def test_a_failed_request_is_told_from_the_others(
    poisoned_llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = [sound_prompt(1, 20), [*sound_prompt(2, 30), POISON], sound_prompt(3, 5)]
    params = SamplingParams(max_tokens=5, seed=1, ignore_eos=True)
    with caplog.at_level(logging.WARNING, "nanovllm"):
        outputs = poisoned_llm.generate(prompts, params, use_tqdm=False)
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    assert_failed(outputs[1])
    assert outputs[1].metrics.first_token_time is None
    (record,) = caplog.records
    assert record.getMessage().startswith(f"request {outputs[1].request_id} ended: no token can be")
    assert_idle(poisoned_llm)
    (piece,) = poisoned_llm.stream([1, 2, POISON])
    assert_failed(piece)
    (whole,) = join(poisoned_llm.stream(prompts[0], params))
    assert whole.token_ids == outputs[0].token_ids


def test_a_failed_requests_kv_is_in_no_cache(poisoned_llm: LLM) -> None:
    """Symptom: blocks that earlier chunks published stay, and their NaN is hit for ever."""
    prompt = [POISON, *sound_prompt(7, 90)]
    for _ in range(2):
        output = generate(poisoned_llm, prompt)
        assert_failed(output)
        assert output.num_cached_tokens == 0


def test_async_requests_fail_alone(poisoned: str) -> None:
    params = SamplingParams(max_tokens=5, seed=1, ignore_eos=True)

    async def main() -> tuple[RequestOutput, RequestOutput, list[RequestOutput]]:
        llm = AsyncLLM(poisoned, dtype="float32", **OPTIONS)
        try:
            sound, failed = await asyncio.gather(
                llm.generate([1, 2, 3], params), llm.generate([1, POISON, 3], params)
            )
            return sound, failed, [piece async for piece in llm.stream([POISON], params)]
        finally:
            llm.shutdown()

    sound, failed, (piece,) = asyncio.run(main())
    assert (sound.finish_reason, len(sound.token_ids)) == ("length", 5)
    assert_failed(failed)
    assert_failed(piece)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rules_that_leave_no_token_say_nothing_about_the_kv(
    poisoned_llm: LLM, temperature: float
) -> None:
    """Symptoms: a token that the request forbids, or token 0; a shared prompt leaves the cache."""
    prompt = sound_prompt(11, 40)
    generate(poisoned_llm, prompt)
    everything = list(range(1003))
    none_left = SamplingParams(
        temperature=temperature, min_tokens=2, stop_token_ids=everything, max_tokens=4
    )
    too_much = SamplingParams(temperature=temperature, repetition_penalty=1e-300, max_tokens=4)
    fails = SamplingParams(temperature=temperature, logits_processors=[lambda *_: 1 // 0])
    for params, reason in (
        (none_left, "no token can be chosen: the request's rules"),
        (too_much, "no token can be chosen: the request's rules"),
        (fails, "a logits processor failed: ZeroDivisionError"),
    ):
        output = generate(poisoned_llm, prompt, params)
        assert output.finish_reason == "error"
        assert str(output.outputs[0].stop_reason).startswith(reason)
    assert generate(poisoned_llm, prompt).num_cached_tokens == 36


def test_rules_of_broken_logits_do_not_hide_them(poisoned_llm: LLM) -> None:
    """The KV of a request whose processor fails on NaN is not to be trusted either."""
    prompt = [POISON, *sound_prompt(12, 40)]
    for rules in (
        {"allowed_token_ids": [5, 6]},
        {"logits_processors": [lambda *_: 1 // 0]},
        {"repetition_penalty": 1.5},
    ):
        for _ in range(2):
            output = generate(poisoned_llm, prompt, SamplingParams(temperature=0.0, **rules))
            assert output.finish_reason == "error"
            assert output.num_cached_tokens == 0


@pytest.mark.thinned(2)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("options", CPU_KINDS)
def test_a_block_carries_nothing_over_to_its_next_owner(
    model: str, options: Any, value: float
) -> None:
    """Symptom: 0 * inf = NaN. Attention multiplies the values of masked keys by 0.

    Chunks, single tokens, and prefix hits; prompts end at all places of a block.
    """
    rng = random.Random(5)
    shared = random_prompt(rng, 70)
    requests: list[Request] = []
    for index, length in enumerate((1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 90)):
        params = SamplingParams(
            temperature=0.5 * (index % 2), seed=index, max_tokens=20, ignore_eos=True
        )
        prompt = random_prompt(rng, length)
        requests += [(prompt, params), ((shared + prompt)[:100], params)]
    llm = LLM(model, num_kvcache_blocks=120, **OPTIONS, **options)
    clean = run(llm.engine, requests)
    llm.shutdown()
    llm = LLM(model, num_kvcache_blocks=120, **OPTIONS, **options)
    runner = llm.engine.executor._runner  # type: ignore[attr-defined]
    for attention in runner.network.attention.layers:
        fill(attention.kv_cache, value)
    dirty = run(llm.engine, requests)
    llm.shutdown()
    assert token_ids(dirty) == token_ids(clean)
    assert any(output.num_cached_tokens for output in dirty)
    assert all(output.finish_reason == "length" for output in dirty)


@torch.inference_mode()
def fill(kv_cache: torch.Tensor, value: float) -> None:
    """Fill a layer's cache with `value`; in 8 and 4 bits with the largest numbers, so scaled."""
    if kv_cache.dtype not in (torch.int8, torch.uint8):
        kv_cache.fill_(value)
        return
    *_, block_size, row = kv_cache.shape
    # Scales follow the keys, and the values: see `ops.cache_row`.
    numbers, scales = row - 2, 2
    if kv_cache.dtype == torch.uint8:
        numbers, scales = (row - 1) * 8 // 9, (row - 1) * 2 // 9
    block = kv_cache.view(*kv_cache.shape[:2], -1)
    block.fill_(torch.iinfo(kv_cache.dtype).max)
    values = (numbers + scales) * block_size
    block[..., numbers * block_size : values].view(torch.float16).fill_(value)
    block[..., values + numbers * block_size :].view(torch.float16).fill_(value)
