"""An EAGLE-3 head changes no token, and its drafts depend on the tokens before them alone."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nanovllm import LLM, SamplingParams
from nanovllm.errors import CheckpointError, UnsupportedModelError
from tests.checkpoints import make_checkpoint
from tests.eagle3_checkpoints import change_tensors, make_eagle3_checkpoint
from tests.helpers import each_option, random_prompt
from tests.kernels.cpu.helpers import native
from tests.speculation.proposers.drafting import (
    NATIVE,
    PREEMPTING,
    Drafted,
    acceptance,
    allow_all,
    make_requests,
    run,
    speculating,
    watch_drafts,
)

REQUESTS = make_requests(16, sharing=False)
"""A row that shares a prefix with another may draft something else: see `DraftHead`."""

OPTIONS: dict[str, dict[str, Any]] = {
    "one batch": {"kvcache_block_size": 4},
    "chunks of 7": {"kvcache_block_size": 4, "max_num_batched_tokens": 7},
    "chunks of 33, preemption": {**PREEMPTING, "max_num_batched_tokens": 33},
    "no prefix cache, preemption": {**PREEMPTING, "enable_prefix_caching": False},
    "two ranks": {**PREEMPTING, "tensor_parallel_size": 2},
}


@pytest.fixture(scope="module")
def head(random_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_eagle3_checkpoint(tmp_path_factory.mktemp("head"), random_model)


@pytest.fixture(scope="module")
def alone(random_model: str, head: str) -> tuple[list[Any], Drafted]:
    """What users see of `REQUESTS` without speculation, and what is drafted one at a time."""
    plain = {"kvcache_block_size": 4, "enable_prefix_caching": False}
    made: list[LLM] = []

    def make_llm(path: str, **options: Any) -> LLM:
        made.append(LLM(path, **options))
        return made[-1]

    expected, _ = run(make_llm, random_model, REQUESTS, **plain)
    with pytest.MonkeyPatch.context() as patch:
        allow_all(patch)
        drafted = watch_drafts(patch)
        one_by_one = {**plain, "max_num_seqs": 1, **speculating("eagle3", head)}
        found, _ = run(make_llm, random_model, REQUESTS, **one_by_one)
    for llm in made:
        llm.shutdown()
    assert without_logprobs(found) == without_logprobs(expected)
    return expected, drafted


def without_logprobs(seen: list[Any]) -> list[Any]:
    return [part[:2] for part in seen]


@pytest.mark.parametrize("options", each_option(OPTIONS, long=["two ranks"]))
def test_a_head_changes_no_token(
    options: dict[str, Any],
    random_model: str,
    head: str,
    alone: tuple[list[Any], Drafted],
    make_llm: Any,
    preempted: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allow_all(monkeypatch)
    expected, drafted_alone = alone
    drafted, num_drafted = watch_drafts(monkeypatch, drafted_alone), len(drafted_alone)
    speculation = speculating("eagle3", head)
    found, llm = run(make_llm, random_model, REQUESTS, 2, **options, **speculation)
    assert without_logprobs(found) == without_logprobs(expected * 2)
    assert bool(preempted) == ("num_kvcache_blocks" in options)
    assert acceptance(llm)[1] > 20
    assert len(drafted) < 1.5 * num_drafted, "few contexts are new, so most drafts were compared"


def test_a_shared_prefix_changes_no_token(
    random_model: str, head: str, make_llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = make_requests(16)
    expected, _ = run(make_llm, random_model, requests, **PREEMPTING)
    allow_all(monkeypatch)
    found, _ = run(make_llm, random_model, requests, 2, **PREEMPTING, **speculating("eagle3", head))
    assert without_logprobs(found) == without_logprobs(expected * 2)


def test_drafts_after_steps_without_any(
    random_model: str, head: str, make_llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that catches up drafts what it drafts when it was asked in every step."""
    watch_drafts(monkeypatch)
    for seed in (None, 0):
        allow_all(monkeypatch, seed)
        run(make_llm, random_model, REQUESTS, 2, **PREEMPTING, **speculating("eagle3", head))


@native
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"quantization": "int8", "kv_cache_dtype": "int8", "num_kvcache_blocks": 7},
        {"enforce_eager": True, "max_num_batched_tokens": 17},
    ],
    ids=str,
)
def test_the_c_kernels_give_the_same_bits(
    options: dict[str, Any],
    shared_checkpoint: Any,
    make_llm: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = shared_checkpoint(**NATIVE)
    head = make_eagle3_checkpoint(tmp_path, model)
    options = {"kvcache_block_size": 32, **options}
    expected, _ = run(make_llm, model, REQUESTS, **options)
    allow_all(monkeypatch)
    watch_drafts(monkeypatch)
    found, llm = run(make_llm, model, REQUESTS, 2, **options, **speculating("eagle3", head))
    assert found == expected * 2
    assert acceptance(llm)[1] > 100


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
    assert len(drafted) > 100


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
    assert found[0][0] == [900] * 20
    num_accepted, num_proposed = acceptance(llm)
    assert num_accepted == num_proposed > 10


@pytest.mark.parametrize("name", ["fc__weight", "norm__weight", "lm_head__weight"])
def test_a_head_that_is_nan_changes_nothing(
    name: str,
    random_model: str,
    make_llm: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected, _ = run(make_llm, random_model, REQUESTS[:6], **PREEMPTING)
    allow_all(monkeypatch)
    head = make_eagle3_checkpoint(tmp_path, random_model)
    tensor = load_file(tmp_path / "model.safetensors")[name.replace("__", ".")]
    change_tensors(tmp_path, **{name: torch.full_like(tensor, torch.nan)})
    found, llm = run(
        make_llm, random_model, REQUESTS[:6], **PREEMPTING, **speculating("eagle3", head)
    )
    assert without_logprobs(found) == without_logprobs(expected)
    assert acceptance(llm)[1] > 20


def test_a_head_for_another_model_is_refused(
    random_model: str, make_llm: Any, tmp_path: Path
) -> None:
    wide = make_checkpoint(tmp_path / "wide", hidden_size=96)
    head = make_eagle3_checkpoint(tmp_path / "head", wide)
    with pytest.raises(CheckpointError, match="for a model with hidden_size 96.* has 64"):
        make_llm(random_model, **speculating("eagle3", head))
    with pytest.raises(UnsupportedModelError, match="not an EAGLE-3 head"):
        make_llm(random_model, **speculating("eagle3", wide))
