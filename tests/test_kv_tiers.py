"""KV below the pool, in whole engines: the same tokens as without, hits from there, and what fails.

The models are computed by the C kernels in bfloat16, where a token's bits do not depend on the
batch; without a compiler they are float32.
"""

import dataclasses
import gc
import json
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams, demo_model
from nanovllm.errors import ConfigError
from nanovllm.features.tiers.directory import DirectoryStore
from nanovllm.features.tiers.traffic import TierTraffic
from nanovllm.kernels.cpu.library import library
from nanovllm.scheduler.scheduler import TierStats
from tests.forked_ranks import forked_ranks
from tests.glossary import QUESTIONS
from tests.helpers import (
    Request,
    assert_idle,
    environment,
    generate,
    generate_all,
    random_prompt,
    token_ids,
    wait_until,
)
from tests.speculation.proposers.drafting import allow_all
from tests.test_native_invariance import MODEL, OTHER_FAMILIES
from tests.tiers.invariants import load_gate

NATIVE = library() is not None
SECONDS = 30
BLOCK_SIZE = 32
MAX_MODEL_LEN = 256
MODELS = ("shipped", "qwen3_5_text", "gemma3_text")
POOLS = {"shipped": 12, "qwen3_5_text": 40, "gemma3_text": 50}
"""Blocks for one sequence of MAX_MODEL_LEN tokens, and a few more."""
GIB: dict[str, Any] = {"kv_offload_gib": 0.05}


@pytest.fixture(autouse=True)
def always_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load what a tier has, although these models compute a token faster."""
    monkeypatch.setattr(TierTraffic, "pays", lambda self, *_: True)


@pytest.fixture
def model(request: pytest.FixtureRequest, shared_checkpoint: Callable[..., str]) -> str:
    name = request.param
    if name == "shipped":
        return demo_model.MODEL
    changes = {"model_type": name, **OTHER_FAMILIES[name], "eos_token_id": 7}
    return shared_checkpoint(**{**MODEL, **changes, "pad_token_id": 0, "bos_token_id": 1})


def make_requests(count: int, seed: int = 0) -> list[Request]:
    """Prompts of 40 to 200 tokens. Many share a prefix."""
    rng = random.Random(seed)
    shared = random_prompt(rng, 120)
    found = []
    for index in range(count):
        start = shared[: rng.choice([0, 0, 64, 120])]
        prompt = start + random_prompt(rng, rng.randint(40, 200 - len(start)))
        params = SamplingParams(temperature=0.8 * (index % 2), seed=index, max_tokens=8)
        found.append((prompt, params))
    return found


@pytest.fixture
def engine(make_llm: Callable[..., LLM]) -> Callable[..., LLM]:
    def make(model: str, **options: Any) -> LLM:
        options = {"max_model_len": MAX_MODEL_LEN, "kvcache_block_size": BLOCK_SIZE, **options}
        if not NATIVE:
            options["dtype"] = "float32"
        return make_llm(model, **options)

    return make


def stats_of(llm: LLM) -> TierStats:
    stats = llm.engine.stats.tiers
    assert stats is not None
    return stats


def written(directory: Path) -> list[Path]:
    """Return the files of entries."""
    return [path for path in directory.glob("*/rank*/??/*") if path.is_file()]


@pytest.mark.parametrize(
    ("model", "name", "options"),
    [
        *((name, name, {}) for name in MODELS),
        *([("shipped", "shipped", {"kv_cache_dtype": "int4"})] if NATIVE else []),
        ("shipped", "shipped", {"max_num_batched_tokens": 50}),
    ],
    indirect=["model"],
)
def test_a_small_pool_with_host_memory(
    engine: Any, model: str, name: str, options: dict[str, Any]
) -> None:
    """A pool of less than a quarter of the working set: the second time, prompts come from host."""
    requests = make_requests(12)
    expected = token_ids(
        generate_all(engine(model, enable_prefix_caching=False, **options), requests)
    )
    llm = engine(model, num_kvcache_blocks=POOLS[name], **GIB, **options)
    for _ in range(2):
        assert token_ids(generate_all(llm, requests)) == expected
    assert_idle(llm)
    stats = stats_of(llm)
    assert stats.num_host_tokens > 300
    assert stats.num_failed_loads == 0
    assert stats.num_store_tokens == 0


@pytest.mark.parametrize("model", ["shipped"], indirect=True)
def test_a_request_that_its_own_rules_end_takes_no_prompt_from_the_tiers(
    engine: Any, model: str
) -> None:
    """Symptom: a system prompt that all share was computed for each, for the life of the engine."""
    llm = engine(model, num_kvcache_blocks=9, **GIB)
    system = list(range(100, 196))
    greedy = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    no_token = dataclasses.replace(greedy, min_tokens=2, stop_token_ids=list(range(1024)))
    generate(llm, [*system, 1], greedy)
    assert generate(llm, [*system, 2], no_token).finish_reason == "error"
    for turn in range(2):
        generate(llm, [turn] * 250, greedy)  # the system prompt leaves the pool
        assert generate(llm, [*system, 3 + turn], greedy).num_cached_tokens == len(system)
    assert stats_of(llm).num_host_tokens > 0


@pytest.mark.parametrize(("model", "name"), [(name, name) for name in MODELS], indirect=["model"])
def test_the_next_engine_finds_prompts_in_the_directory(
    engine: Any, model: str, name: str, tmp_path: Path
) -> None:
    requests = make_requests(8)
    requests = [(prompt, params.clone(logprobs=3)) for prompt, params in requests]
    first = engine(model, kv_cache_dir=tmp_path)
    expected = generate_all(first, requests)
    first.shutdown()
    assert written(tmp_path)
    for options in ({}, {"num_kvcache_blocks": POOLS[name], **GIB}):
        llm = engine(model, kv_cache_dir=tmp_path, **options)
        found = generate_all(llm, requests)
        assert token_ids(found) == token_ids(expected)
        assert [o.outputs[0].logprobs for o in found] == [o.outputs[0].logprobs for o in expected]
        assert_idle(llm)
        assert stats_of(llm).num_store_tokens > 300
        assert stats_of(llm).num_failed_loads == 0
        cached = [output.num_cached_tokens for output in found]
        assert sum(cached) > 300
        llm.shutdown()


CHILD = """
import json, sys
from nanovllm import LLM, SamplingParams, demo_model
from nanovllm.features.tiers.traffic import TierTraffic

TierTraffic.pays = lambda self, *_: True
llm = LLM(demo_model.MODEL, max_model_len=256, kvcache_block_size=32, kv_cache_dir=sys.argv[1])
(output,) = llm.generate(sys.argv[2], SamplingParams(temperature=0, max_tokens=1, logprobs=5))
entries = {t: e.logprob for t, e in output.outputs[0].logprobs[0].items()}
print(json.dumps([output.num_cached_tokens, output.token_ids, entries]))
"""


@pytest.mark.long
def test_another_process_finds_them(tmp_path: Path) -> None:
    """The first one ends at once, behind a single token, and does not call shutdown()."""
    prompt = " ".join(QUESTIONS[:12])
    found = []
    for _ in range(2):
        command = [sys.executable, "-c", CHILD, str(tmp_path), prompt]
        done = subprocess.run(
            command, env=environment(), stdout=subprocess.PIPE, text=True, check=True, timeout=60
        )
        found.append(json.loads(done.stdout.splitlines()[-1]))
    (none, *first), (hits, *second) = found
    assert none == 0
    assert hits >= 64
    assert first == second


def test_drafts_behind_loaded_blocks(
    engine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A draft network has no KV of a loaded block; it computes it and the tokens stay the same."""
    allow_all(monkeypatch)
    params = SamplingParams(temperature=0, max_tokens=24)
    requests: list[Request] = [(" ".join(QUESTIONS[i : i + 12]), params) for i in range(0, 48, 6)]
    expected = token_ids(generate_all(engine(demo_model.MODEL), requests))
    options: dict[str, Any] = {**GIB, "kv_cache_dir": tmp_path, "num_kvcache_blocks": 12}
    spec = {"method": "draft_model", "model": demo_model.DRAFT_MODEL}
    llm = engine(demo_model.MODEL, speculative_config=spec, **options)
    for _ in range(2):
        assert token_ids(generate_all(llm, requests)) == expected
    assert stats_of(llm).num_host_tokens > 200
    drafting = llm.engine.scheduler.drafting
    assert drafting is not None
    assert drafting.counts.num_accepted_tokens > 20
    assert_idle(llm)


def test_tensor_parallel_ranks_move_their_own_pages(
    random_model: str, make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    """In the last round, half of one rank's files are damaged: what both have right is taken."""
    requests = make_requests(8)
    options = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "kvcache_block_size": 8}
    expected = token_ids(generate_all(make_llm(random_model, **options), requests))
    options |= {"kv_cache_dir": tmp_path, "num_kvcache_blocks": 40, **GIB}
    with forked_ranks():
        llm = make_llm(random_model, tensor_parallel_size=2, **options)
    for _ in range(2):
        assert token_ids(generate_all(llm, requests)) == expected
    stats = stats_of(llm)
    assert stats.num_host_tokens > 300
    assert stats.num_failed_loads == 0
    files = written(tmp_path)
    assert {path.parent.parent.name for path in files} == {"rank0", "rank1"}
    for path in [path for path in files if path.parent.parent.name == "rank1"][::2]:
        path.write_bytes(path.read_bytes()[:-9])
    host = load_gate(llm.engine.scheduler).traffic.host
    assert host is not None
    host.clear()
    assert token_ids(generate_all(llm, requests)) == expected
    assert stats.num_store_tokens > 8
    assert stats.num_failed_loads > 0
    assert_idle(llm)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """While it is cleared, nobody gets an entry from a directory."""
    gate = threading.Event()
    read = DirectoryStore.read

    def waiting(self: DirectoryStore, key: bytes, buffers: Any) -> bool:
        return gate.wait(SECONDS) and read(self, key, buffers)

    monkeypatch.setattr(DirectoryStore, "read", waiting)
    gate.set()
    return gate


def fill(engine: Any, directory: Path, prompt: Any) -> list[int]:
    """Let a first engine write a prompt; return the tokens behind it."""
    llm = engine(demo_model.MODEL, kv_cache_dir=directory)
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    llm.shutdown()
    return list(output.token_ids)


def test_others_do_not_wait_for_a_load_and_it_may_be_aborted(
    engine: Any, tmp_path: Path, gate: threading.Event
) -> None:
    (prompt, params), (other, _) = make_requests(2)
    expected = fill(engine, tmp_path, prompt)
    gate.clear()
    llm = engine(demo_model.MODEL, kv_cache_dir=tmp_path, num_kvcache_blocks=20)
    steps = llm.engine
    steps.add_request(other, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    steps.step()
    loading = steps.add_request(prompt, params)
    for _ in range(10):
        steps.step()
    assert len(load_gate(steps.scheduler)._loading) == 1
    assert steps.stats.num_decode_tokens >= 10
    steps.abort(loading)
    threading.Timer(0.2, gate.set).start()
    while not steps.is_finished():  # a step that needs its pages waits for the threads
        steps.step()
    assert_idle(llm)
    params = SamplingParams(temperature=0, max_tokens=8)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert output.token_ids == expected
    assert output.num_cached_tokens


def test_a_load_that_fails_is_computed(engine: Any, tmp_path: Path) -> None:
    """Never an error, never a wrong token."""
    (prompt, _), *_ = make_requests(1, seed=3)
    expected = fill(engine, tmp_path, prompt)
    for path in written(tmp_path)[::2]:
        path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    llm = engine(demo_model.MODEL, kv_cache_dir=tmp_path)
    params = SamplingParams(temperature=0, max_tokens=8)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert output.token_ids == expected
    assert stats_of(llm).num_failed_loads == 1
    assert_idle(llm)


def test_threads_and_memory_end_with_the_engine(tmp_path: Path) -> None:
    def transfers() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "kv-transfer"]

    before = len(transfers())
    llm = LLM(demo_model.MODEL, max_model_len=64, kv_cache_dir=tmp_path, **GIB)
    assert len(transfers()) == before + 3
    info = llm.engine.worker_info
    assert info.tiers.num_host_slots > 0
    assert 0 < info.tiers.token_seconds < 1
    assert 0 < info.tiers.page_seconds < 1
    runner = llm.engine.executor._runner  # type: ignore[attr-defined]
    assert not runner.network.pool.pages.any(), "measuring leaves nothing in the pool"
    del runner
    llm.generate(QUESTIONS[0], SamplingParams(max_tokens=2), use_tqdm=False)
    del llm
    gc.collect()
    wait_until(lambda: len(transfers()) == before, SECONDS)


def test_limits_that_hold_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_offload_gib 1e-06 holds no page of \d+ bytes: give"):
        LLM(demo_model.MODEL, max_model_len=64, kv_offload_gib=1e-6)
    with pytest.raises(ConfigError, match=r"kv_cache_dir_gib 1e-06 holds no page"):
        LLM(demo_model.MODEL, max_model_len=64, kv_cache_dir=tmp_path, kv_cache_dir_gib=1e-6)
