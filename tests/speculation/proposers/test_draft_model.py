"""A draft model changes no token, and one that equals the target is always right.

The second is the sharper test: KV that is missing or stale makes it propose something else.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm import SamplingParams, demo_model
from nanovllm.errors import ConfigError
from tests.checkpoints import copy_checkpoint, make_checkpoint
from tests.helpers import generate_all, random_prompt, token_ids
from tests.kernels.cpu.helpers import native
from tests.speculation.proposers.drafting import (
    MAX_MODEL_LEN,
    NATIVE,
    PREEMPTING,
    acceptance,
    allow_all,
    make_requests,
    run,
    speculating,
    watch_drafts,
)

REQUESTS = make_requests(16)

OPTIONS: dict[str, dict[str, Any]] = {
    "one batch": {"kvcache_block_size": 4},
    "batches of 1": {"kvcache_block_size": 16, "max_num_seqs": 1},
    "chunks of 7": {"kvcache_block_size": 4, "max_num_batched_tokens": 7},
    "chunks of 33, preemption": {**PREEMPTING, "max_num_batched_tokens": 33},
    "no prefix cache, preemption": {**PREEMPTING, "enable_prefix_caching": False},
}
IN_CHUNKS = {name: OPTIONS[name] for name in ("chunks of 7", "chunks of 33, preemption")}
IN_BATCHES = {name: options for name, options in OPTIONS.items() if name != "batches of 1"}


@pytest.fixture(scope="module")
def model(shared_checkpoint: Any) -> str:
    return shared_checkpoint(**NATIVE)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def other(shared_checkpoint: Any) -> str:
    """A smaller model, of fewer positions than the sequences have."""
    return shared_checkpoint(  # type: ignore[no-any-return]
        num_hidden_layers=1, hidden_size=32, max_position_embeddings=40
    )


@pytest.fixture(scope="module")
def expected(random_model: str) -> list[Any]:
    """What users see without speculation, one request at a time and without a prefix cache."""
    from nanovllm import LLM

    options = {"kvcache_block_size": 16, "enable_prefix_caching": False, "max_num_seqs": 1}
    found, llm = run(LLM, random_model, REQUESTS, **options)
    llm.shutdown()
    return found


def tokens_of(seen: list[Any]) -> list[Any]:
    return [(tokens, ends) for tokens, ends, *_ in seen]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    """Check tokens, ends, and log-probabilities up to the rounding of other batches."""
    expected = expected * (len(found) // len(expected))
    assert tokens_of(found) == tokens_of(expected)
    for (*_, one, prompt_one), (*_, other, prompt_other) in zip(found, expected, strict=True):
        for of_one, of_other in ((one, other), (prompt_one, prompt_other)):
            numbers = [
                [{} if tops is None else {t: v.logprob for t, v in tops.items()} for tops in each]
                for each in (of_one or [], of_other or [])
            ]
            for got, wanted in zip(*numbers, strict=True):
                assert got == pytest.approx(wanted, abs=1e-4)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_target_as_its_own_draft_is_always_right(
    options: dict[str, Any],
    random_model: str,
    expected: list[Any],
    make_llm: Any,
    preempted: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allow_all(monkeypatch)
    speculation = speculating("draft_model", random_model)
    found, llm = run(make_llm, random_model, REQUESTS, 2, **options, **speculation)
    assert_same(found, expected)
    assert bool(preempted) == ("num_kvcache_blocks" in options)
    num_accepted, num_proposed = acceptance(llm)
    assert num_proposed > 20
    # A draft behind an end-of-sequence token counts as rejected.
    ended = sum(ends[0] == "stop" for _, ends, *_ in found)
    assert num_proposed - num_accepted <= 4 * ended


@pytest.mark.parametrize("options", IN_CHUNKS.values(), ids=IN_CHUNKS)
def test_the_target_is_right_after_steps_without_drafts(
    options: dict[str, Any], random_model: str, make_llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then it catches up: with some tokens of its own, and with some drafts kept."""
    requests = [
        (prompt, SamplingParams(temperature=i % 2, seed=i, max_tokens=30, ignore_eos=True))
        for i, (prompt, _) in enumerate(REQUESTS)
    ]
    allow_all(monkeypatch, seed=0)
    speculation = speculating("draft_model", random_model)
    _, llm = run(make_llm, random_model, requests, 2, **options, **speculation)
    num_accepted, num_proposed = acceptance(llm)
    assert num_accepted == num_proposed > 20


@pytest.mark.parametrize("options", IN_BATCHES.values(), ids=IN_BATCHES)
def test_another_draft_model_changes_no_token(
    options: dict[str, Any],
    random_model: str,
    other: str,
    expected: list[Any],
    make_llm: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its drafts, most of them wrong, depend on the tokens before them alone."""
    allow_all(monkeypatch)
    drafted = watch_drafts(monkeypatch)
    speculation = speculating("draft_model", other)
    found, llm = run(make_llm, random_model, REQUESTS, 2, **options, **speculation)
    assert_same(found, expected)
    num_accepted, num_proposed = acceptance(llm)
    assert num_accepted < num_proposed / 4
    longest = max(len(tokens) + len(drafts) for (_, tokens), drafts in drafted.items() if drafts)
    assert longest <= 41


def test_drafts_end_with_the_positions_of_the_draft_model(
    random_model: str, other: str, make_llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last position, 39, drafts the token of position 40."""
    allow_all(monkeypatch)
    drafted = watch_drafts(monkeypatch)
    params = SamplingParams(temperature=0, seed=1, max_tokens=40, ignore_eos=True)
    run(make_llm, random_model, [([1] * 30, params)], **speculating("draft_model", other))
    counts = {len(tokens): len(drafts) for (_, tokens), drafts in drafted.items()}
    assert counts[31] == 5
    assert {length: 41 - length for length in range(36, 41)}.items() <= counts.items()
    assert max(counts) > 50
    assert not any(count for length, count in counts.items() if length > 40)


@native
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"quantization": "int8", "kv_cache_dtype": "int8"},
        {"quantization": "int4", "max_num_batched_tokens": 17},
        {"enforce_eager": True, "num_kvcache_blocks": 7},
    ],
    ids=str,
)
def test_the_c_kernels_give_the_same_bits(
    options: dict[str, Any], model: str, make_llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"kvcache_block_size": 32, **options}
    expected, _ = run(make_llm, model, REQUESTS, **options)
    allow_all(monkeypatch)
    found, llm = run(make_llm, model, REQUESTS, 2, **options, **speculating("draft_model", model))
    assert found == expected * 2
    num_accepted, num_proposed = acceptance(llm)
    assert num_accepted > 0.95 * num_proposed
    assert llm.engine.executor._runner.drafter._network.attention.layers[0].kv_cache.dtype == (
        torch.int8 if "kv_cache_dtype" in options else torch.bfloat16
    )


def with_nan(model: str, path: Path, name: str, rows: slice = slice(None)) -> str:
    """Copy a checkpoint; make `rows` of the tensor `name` NaN."""
    copied = copy_checkpoint(model, path)
    tensors = load_file(path / "model.safetensors")
    tensors[name][rows] = torch.nan
    save_file(tensors, path / "model.safetensors")
    return copied


def test_a_draft_model_that_is_nan_changes_nothing(
    random_model: str,
    expected: list[Any],
    make_llm: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allow_all(monkeypatch)
    broken = with_nan(random_model, tmp_path, "model.norm.weight")
    options = {**PREEMPTING, **speculating("draft_model", broken)}
    found, llm = run(make_llm, random_model, REQUESTS, **options)
    assert_same(found, expected)
    assert acceptance(llm)[1] > 100


def test_nan_of_one_sequence_does_not_reach_the_next_owner_of_its_blocks(
    random_model: str, make_llm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft model is NaN for one token, and right for all other sequences."""
    allow_all(monkeypatch)
    poison = 1002
    broken = with_nan(random_model, tmp_path, "model.embed_tokens.weight", slice(poison, None))
    options = {**PREEMPTING, "max_num_seqs": 2, **speculating("draft_model", broken)}
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    rng = random.Random(3)
    prompts = [random_prompt(rng, 20) for _ in range(5)]
    assert all(poison not in prompt for prompt in prompts)
    llm = make_llm(random_model, max_model_len=MAX_MODEL_LEN, **options)
    generate_all(llm, [([poison, *prompt], params) for prompt in prompts])  # fills the pool
    drafts = llm.engine.scheduler.drafting.counts
    before = drafts.num_accepted_tokens, drafts.num_draft_tokens
    outputs = generate_all(llm, [(prompt, params) for prompt in prompts])
    assert all(poison not in tokens for tokens in token_ids(outputs))
    num_accepted, num_proposed = (
        after - first for after, first in zip(acceptance(llm), before, strict=True)
    )
    assert num_accepted == num_proposed > 100


def test_ranks_draft_the_same_tokens(
    random_model: str, expected: list[Any], make_llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow_all(monkeypatch)
    options = {**PREEMPTING, "tensor_parallel_size": 2, "dtype": "float32"}
    speculation = speculating("draft_model", random_model)
    found, llm = run(make_llm, random_model, REQUESTS, **options, **speculation)
    assert_same(found, expected)
    num_accepted, num_proposed = acceptance(llm)
    assert num_accepted > 0.95 * num_proposed > 100


def test_a_draft_of_another_vocabulary_is_refused(
    random_model: str, make_llm: Any, tmp_path: Path
) -> None:
    other = make_checkpoint(tmp_path / "other", vocab_size=1004)
    with pytest.raises(ConfigError, match=r"other has a vocabulary of 1004 tokens.* has 1003"):
        make_llm(random_model, **speculating("draft_model", other))


def test_a_draft_of_another_tokenizer_is_refused(make_llm: Any, tmp_path: Path) -> None:
    """The vocabularies are of the same size: two tokens have changed places."""
    draft = copy_checkpoint(demo_model.MODEL, tmp_path)
    file = tmp_path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="another tokenizer than the model: token 'a' is"):
        make_llm(demo_model.MODEL, **speculating("draft_model", draft))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).unlink(missing_ok=True)
    make_llm(demo_model.MODEL, max_model_len=64, **speculating("draft_model", draft))
