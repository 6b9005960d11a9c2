"""The drafts of an EAGLE-3 head depend on the tokens before them alone.

tests/test_speculation.py has what all proposers promise.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nanovllm import SamplingParams
from nanovllm.errors import CheckpointError, UnsupportedModelError
from tests.checkpoints import make_checkpoint
from tests.eagle3_checkpoints import change_tensors, make_eagle3_checkpoint
from tests.helpers import random_prompt
from tests.kernels.cpu.helpers import native
from tests.speculation.proposers.drafting import (
    NATIVE,
    PREEMPTING,
    acceptance,
    allow_all,
    make_requests,
    run,
    speculating,
    watch_drafts,
)

REQUESTS = make_requests(12, sharing=False)
"""A row that shares a prefix with another may draft something else: see `DraftHead`."""


@pytest.fixture(scope="module")
def head(random_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_eagle3_checkpoint(tmp_path_factory.mktemp("head"), random_model)


def test_drafts_after_steps_without_any(
    random_model: str, head: str, make_llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row drafts what it drafts alone, when it is asked in every step, and when it catches up."""
    drafted = watch_drafts(monkeypatch)
    alone = {"kvcache_block_size": 4, "enable_prefix_caching": False, "max_num_seqs": 1}
    chunks = {"kvcache_block_size": 4, "max_num_batched_tokens": 7}
    for seed, options in ((None, alone), (None, chunks), (0, PREEMPTING)):
        allow_all(monkeypatch, seed)
        num_before = len(drafted)
        run(make_llm, random_model, REQUESTS, **options, **speculating("eagle3", head))
    assert len(drafted) < 1.5 * num_before, "few contexts are new, so most drafts were compared"


@native
def test_recorded_steps_draft_the_same(
    shared_checkpoint: Any, make_llm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shared_checkpoint(**NATIVE)
    head = make_eagle3_checkpoint(tmp_path, model)
    allow_all(monkeypatch)
    drafted = watch_drafts(monkeypatch)
    for enforce_eager in (True, False):
        eager = dict(drafted)
        options = {"kvcache_block_size": 32, "enforce_eager": enforce_eager}
        _, llm = run(make_llm, model, REQUESTS, **options, **speculating("eagle3", head))
        recorded = llm.engine.executor._runner.drafter._recorded
        assert [one is None for one in recorded] == [enforce_eager] * 2
    assert drafted == eager
    assert len(drafted) > 60


def make_copying_head(path: Path, model: str) -> str:
    """Return a head that always drafts token 5: its output is a constant of its last norm."""
    head = make_eagle3_checkpoint(path, model, draft_vocab_size=1003)
    tensors = load_file(path / "model.safetensors")
    lm_head = torch.zeros_like(tensors["lm_head.weight"])
    zeros = torch.zeros_like(tensors["norm.weight"])
    change_tensors(path, lm_head__weight=lm_head, norm__weight=zeros)
    return head


def test_the_most_likely_token_by_the_request_s_rules(
    random_model: str, make_llm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All logits of this head are 0, so a bias says what it drafts, and all is accepted."""
    allow_all(monkeypatch)
    head = make_copying_head(tmp_path, random_model)
    params = SamplingParams(
        temperature=1.0, seed=1, max_tokens=20, ignore_eos=True, logit_bias={900: 100.0}
    )
    prompt = random_prompt(random.Random(1), 9)
    found, llm = run(make_llm, random_model, [(prompt, params)], **speculating("eagle3", head))
    assert found[0].token_ids == [900] * 20
    num_accepted, num_proposed = acceptance(llm)
    assert num_accepted == num_proposed > 10


def test_a_head_for_another_model_is_refused(
    random_model: str, make_llm: Any, tmp_path: Path
) -> None:
    wide = make_checkpoint(tmp_path / "wide", hidden_size=96)
    head = make_eagle3_checkpoint(tmp_path / "head", wide)
    with pytest.raises(CheckpointError, match="for a model with hidden_size 96.* has 64"):
        make_llm(random_model, **speculating("eagle3", head))
    with pytest.raises(UnsupportedModelError, match="not an EAGLE-3 head"):
        make_llm(random_model, **speculating("eagle3", wide))
