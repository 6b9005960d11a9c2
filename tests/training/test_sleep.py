"""Sleep gives memory back, requests end by the rule, and waking up gives the same tokens."""

import asyncio
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, AsyncLLM, SamplingParams
from nanovllm.errors import InvalidRequestError
from nanovllm.features.training.memory import HeldWeights
from tests.helpers import wait_until
from tests.training.test_updates import OPTIONS, PROMPTS, tokens_of
from tests.training.weights import FAMILIES, SMALL, changed, read_weights

LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


@pytest.fixture
def model(shared_checkpoint: Callable[..., str]) -> str:
    return shared_checkpoint(**SMALL)


@pytest.mark.parametrize(
    ("family", "quantization"), [("qwen3", None), ("qwen3", "int8"), ("qwen3_5_text", "int4")]
)
def test_tokens_after_waking_up(
    family: str, quantization: str | None, shared_checkpoint: Any, make_llm: Callable[..., LLM]
) -> None:
    """With the loaded weights, and with updated ones, of which no file of the model knows."""
    model = shared_checkpoint(**FAMILIES[family])
    llm = make_llm(model, quantization=quantization, **OPTIONS)
    for seed in range(2):
        expected = tokens_of(llm)
        for tags in (None, ["weights"]):
            llm.sleep()
            assert llm.is_sleeping()
            with pytest.raises(InvalidRequestError, match=r"sleeps \(kv_cache and weights\)"):
                tokens_of(llm)
            if tags is not None:
                assert not llm.wake_up(tags)
                with pytest.raises(InvalidRequestError, match=r"sleeps \(kv_cache\)"):
                    tokens_of(llm)
            assert llm.wake_up()
            assert tokens_of(llm) == expected
        llm.update_weights(changed(read_weights(model), seed))
    assert tokens_of(llm) != expected


def test_level_2_forgets(model: str, make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(model, quantization="int8", **OPTIONS)
    expected = tokens_of(llm)
    weights = read_weights(model)
    llm.sleep(level=2)
    with pytest.raises(InvalidRequestError, match=r'wake_up\(\["weights"\]\)'):
        llm.update_weights(weights)
    llm.wake_up(["weights"])
    llm.update_weights(weights)
    assert llm.wake_up(["kv_cache"])
    assert tokens_of(llm) == expected
    llm.sleep(level=1)
    llm.sleep(level=2)  # what level 1 kept is forgotten, too
    llm.wake_up()
    with pytest.raises(InvalidRequestError, match="weights are not whole"):
        tokens_of(llm)
    llm.sleep(level=1)  # keeps nothing that is not whole
    llm.wake_up()
    with pytest.raises(InvalidRequestError, match="weights are not whole"):
        tokens_of(llm)
    llm.update_weights(weights)
    assert tokens_of(llm) == expected


def test_drafts_sleep_too(
    model: str, shared_checkpoint: Callable[..., str], make_llm: Callable[..., LLM]
) -> None:
    """A draft network has no updates: it keeps its weights also at level 2."""
    draft = shared_checkpoint(**{**SMALL, "num_hidden_layers": 1})
    llm = make_llm(
        model, speculative_config={"model": draft, "num_speculative_tokens": 2}, **OPTIONS
    )
    expected = tokens_of(llm)
    llm.sleep(level=2)
    llm.wake_up()
    llm.update_weights(read_weights(model))
    assert tokens_of(llm) == expected


def test_wrong_calls(model: str, make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(model, **OPTIONS)
    expected = tokens_of(llm)
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: llm.sleep(level=0), "sleep level 0 must be 1"),
        (lambda: llm.sleep(level=True), "sleep level True must be 1"),
        (lambda: llm.sleep(mode="keep"), "mode 'keep' must be one of abort, wait"),
        (lambda: llm.wake_up(["model"]), "must be a list of 'weights' and 'kv_cache'"),
        (lambda: llm.wake_up("weights"), "must be a list of 'weights' and 'kv_cache'"),
        (lambda: llm.finish_weight_update(), "no update of the weights has begun"),
        (lambda: llm.update_weights({}, weight_version=1.5), "1.5 must be an int or a str"),
        (lambda: llm.update_weights({}, mode="now"), "mode 'now' must be one of abort, wait"),
    ]
    for call, message in calls:
        with pytest.raises(InvalidRequestError, match=message):
            call()
        assert not llm.is_sleeping()
        assert tokens_of(llm) == expected


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_requests_in_flight(mode: str, model: str, make_llm: Callable[..., LLM]) -> None:
    """Other threads get what there is, or all of it, with the version of the old weights."""
    llm = make_llm(model, **OPTIONS)
    stream = llm.stream(PROMPTS[0], LONG)
    next(stream)
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.extend(llm.generate(PROMPTS, LONG, use_tqdm=False))
    )
    thread.start()
    wait_until(lambda: llm.engine.scheduler.num_unfinished > 1 or bool(found), 20)
    llm.update_weights(changed(read_weights(model), 1), mode=mode)
    thread.join(20)
    assert not thread.is_alive()
    lengths = [len(output.token_ids) for output in found]
    if mode == "wait":
        assert [output.finish_reason for output in found] == ["length"] * 3
        assert sum(len(delta.token_ids) for delta in stream) > 50
    else:
        assert all(output.finish_reason in ("abort", "length") for output in found), lengths
        assert sum(len(delta.token_ids) for delta in stream) < 98
    assert {output.weight_version for output in found} == {0}
    assert llm.generate(PROMPTS[2], LONG, use_tqdm=False)[0].weight_version == 1


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_async_llm(mode: str, model: str) -> None:
    async def run() -> None:
        llm = AsyncLLM(model, **OPTIONS)
        try:
            stream = llm.stream(PROMPTS[0], LONG)
            deltas = [await anext(stream)]  # so that it runs
            await llm.sleep(mode=mode)
            deltas += [delta async for delta in stream]
            assert deltas[-1].finish_reason == {"abort": "abort", "wait": "length"}[mode]
            token_ids = [token for delta in deltas for token in delta.token_ids]
            assert await llm.is_sleeping()
            with pytest.raises(InvalidRequestError, match="sleeps"):
                await llm.generate(PROMPTS[0], LONG)
            await llm.check_health()
            assert await llm.wake_up()
            await llm.update_weights(changed(read_weights(model), 1), weight_version="new")
            again = await llm.generate(PROMPTS[0], LONG)
            assert again.weight_version == "new"
            assert again.token_ids != token_ids
            assert await llm.reset_prefix_cache()
        finally:
            llm.shutdown()

    asyncio.run(run())


def test_tiers_forget_the_old_weights(
    model: str, make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    """KV of the old weights stays on disk; no engine with new weights may find it."""
    options = {**OPTIONS, "kv_cache_dir": str(tmp_path), "kv_offload_gib": 0.01}
    options |= {"num_kvcache_blocks": 12}
    llm, plain = make_llm(model, **options), make_llm(model, **OPTIONS)
    old = tokens_of(llm)
    new = changed(read_weights(model), 1)
    for weights in (new, read_weights(model)):
        llm.update_weights(weights)
        plain.update_weights(weights)
        assert tokens_of(llm) == tokens_of(plain)
        host = llm.engine.executor._runner.parts[0]._copies._memory  # type: ignore[attr-defined]
        host.numpy().fill(1)
        llm.sleep()
        assert not host.any(), "the system has it"
        llm.wake_up()
        assert tokens_of(llm) == tokens_of(plain)
    llm.shutdown()
    assert tokens_of(make_llm(model, **options)) == old


def resident() -> int:
    """Return the bytes of this process's memory that belong to no file."""
    fields = dict(
        line.split(":", 1)
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    )
    return (int(fields["RssAnon"].split()[0]) + int(fields["RssShmem"].split()[0])) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_sleep_gives_memory_back(
    shared_checkpoint: Callable[..., str], make_llm: Callable[..., LLM]
) -> None:
    """At least 90% of the weights and of the pages that requests have used."""
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    sizes["max_position_embeddings"] = 1024
    model = shared_checkpoint(vocab_size=8192, dtype="bfloat16", **sizes)
    llm = make_llm(model, max_model_len=1024, num_kvcache_blocks=256)
    prompts = [[(7 * row + place) % 8000 for place in range(500)] for row in range(4)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    before = [each.token_ids for each in llm.generate(prompts, params, use_tqdm=False)]
    network = llm.engine.executor._runner.network  # type: ignore[attr-defined]
    weights = sum(each.nbytes for each in HeldWeights([network.model]).tensors)
    assert weights > 30 * 2**20
    pages = sum(-(-508 // network.backend.block_size) for _ in prompts) * network.block_bytes
    for level in (1, 2):
        awake = resident()
        llm.sleep(level=level)
        assert awake - resident() >= 0.9 * (weights + pages)
        llm.wake_up()
        if level == 1:
            after = [each.token_ids for each in llm.generate(prompts, params, use_tqdm=False)]
            assert after == before
