"""A draft model that equals the target is right after any steps, and drafts end with its positions.

tests/test_speculation.py has what all proposers promise.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nanovllm import SamplingParams, demo_model
from nanovllm.errors import ConfigError
from tests.checkpoints import copy_checkpoint, make_checkpoint
from tests.eagle3_checkpoints import change_tensors
from tests.helpers import generate_all, random_prompt, token_ids
from tests.speculation.proposers.drafting import (
    MAX_MODEL_LEN,
    PREEMPTING,
    acceptance,
    allow_all,
    make_requests,
    run,
    speculating,
    watch_drafts,
)

REQUESTS = make_requests(16)


@pytest.fixture(scope="module")
def other(shared_checkpoint: Any) -> str:
    """A smaller model, of fewer positions than the sequences have."""
    return shared_checkpoint(  # type: ignore[no-any-return]
        num_hidden_layers=1, hidden_size=32, max_position_embeddings=40
    )


def test_the_target_is_right_after_steps_without_drafts(
    random_model: str, make_llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then it catches up: with some tokens of its own, and with some drafts kept."""
    requests = [
        (prompt, SamplingParams(temperature=i % 2, seed=i, max_tokens=30, ignore_eos=True))
        for i, (prompt, _) in enumerate(REQUESTS)
    ]
    allow_all(monkeypatch, seed=0)
    speculation = speculating("draft_model", random_model)
    options = {**PREEMPTING, "max_num_batched_tokens": 33}
    _, llm = run(make_llm, random_model, requests, 2, **options, **speculation)
    num_accepted, num_proposed = acceptance(llm)
    assert num_accepted == num_proposed > 20


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


def test_nan_of_one_sequence_does_not_reach_the_next_owner_of_its_blocks(
    random_model: str, make_llm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft model is NaN for one token, and right for all other sequences."""
    allow_all(monkeypatch)
    poison = 1002
    broken = copy_checkpoint(random_model, tmp_path)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    embedding[poison:] = torch.nan
    change_tensors(tmp_path, model__embed_tokens__weight=embedding)
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
