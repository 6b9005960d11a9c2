"""A checkpoint's own layer drafts what transformers' modules do, and is accepted where it is right.

tests/test_speculation.py has what all proposers promise.
"""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nanovllm import SamplingParams
from nanovllm.errors import CheckpointError, UnsupportedModelError
from tests.checkpoints import copy_checkpoint, make_checkpoint
from tests.helpers import random_prompt
from tests.mtp_checkpoints import STATEFUL, Reference, add_mtp, save_mtp
from tests.speculation.proposers.drafting import (
    acceptance,
    allow_all,
    run,
    watch_drafts,
)

EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "dense": STATEFUL,
    "experts": {**STATEFUL, "model_type": "qwen3_5_moe_text", **EXPERTS},
    "next": {**STATEFUL, "model_type": "qwen3_next", **EXPERTS},
    "behind the last layer": {
        "model_type": "glm4_moe",
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "num_nextn_predict_layers": 1,
    },
    "latents": {
        "model_type": "glm4_moe_lite",
        "num_key_value_heads": 4,
        "q_lora_rank": 20,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "head_dim": 8,  # the same: another name
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "num_nextn_predict_layers": 1,
    },
    "with a window": {
        "model_type": "mellum",
        "layer_types": ["sliding_attention", "full_attention"],
        "num_hidden_layers": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "sliding_window": 64,
    },
}


def speculating(num_tokens: int = 3) -> dict[str, Any]:
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": num_tokens}}


def tokens_of(seen: list[Any]) -> list[Any]:
    return [part[:2] for part in seen]


@pytest.fixture(scope="module")
def model(shared_checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    return add_mtp(tmp_path_factory.mktemp("mtp"), shared_checkpoint(**STATEFUL))[0]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_modules_draft(
    family: str,
    shared_checkpoint: Any,
    make_llm: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, head = add_mtp(tmp_path, shared_checkpoint(**FAMILIES[family]))
    allow_all(monkeypatch)
    drafted = watch_drafts(monkeypatch)
    rng = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, seed=1)
    requests = [(random_prompt(rng, length), params) for length in (2, 9, 30)]
    run(make_llm, model, requests, kvcache_block_size=4, **speculating())
    assert len(drafted) > 15
    for (_, tokens), drafts in drafted.items():
        assert list(drafts) == head.drafts(list(tokens), len(drafts))


VOCAB = 64
CYCLE = random.Random(0).sample(range(VOCAB), VOCAB)
NEXT = {token: CYCLE[(index + 1) % VOCAB] for index, token in enumerate(CYCLE)}
"""The token that follows each token."""


def make_cyclic(path: Path, is_right: list[bool], dtype: str) -> str:
    """Return a model that says `NEXT`, whose layer for drafts knows it of the tokens `is_right`.

    Its layers add a little to the embedding, so that a wrong state or KV would be seen in its
    log-probabilities, but changes no token.
    """
    small = {"vocab_size": VOCAB, "hidden_size": VOCAB, "tie_word_embeddings": False}
    make_checkpoint(path, **{**STATEFUL, **small, "dtype": dtype})
    target = AutoModelForCausalLM.from_pretrained(path).eval().requires_grad_(False)
    head = Reference(target)
    for module in (target, head):
        for name, parameter in module.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                parameter.mul_(0.05)
            elif name.endswith("norm.weight") and "linear_attn" not in name:
                parameter.zero_()  # of a factor less one
    target.model.embed_tokens.weight.copy_(8 * torch.eye(VOCAB))
    target.lm_head.weight.copy_(torch.eye(VOCAB)[[CYCLE[CYCLE.index(t) - 1] for t in range(VOCAB)]])
    for norm in (head.pre_fc_norm_embedding, head.pre_fc_norm_hidden):
        norm.weight.zero_()
    known = torch.diag(torch.tensor(is_right).float())
    head.fc.weight.copy_(torch.cat([known, torch.zeros(VOCAB, VOCAB)], 1))
    for parameter in (head.layers[0].self_attn.o_proj, head.layers[0].mlp.down_proj):
        parameter.weight.zero_()
    target.save_pretrained(path)
    save_mtp(path, head)
    return str(path)


def implied_counts(
    last: int, num_left: int, is_right: list[bool], num_drafts: int
) -> tuple[int, int]:
    """Return (accepted, proposed) drafts while `num_left` tokens are generated behind `last`."""
    num_accepted = num_proposed = 0
    while num_left:
        limit, count = min(num_drafts, num_left - 1), 0
        while count < limit and is_right[last]:
            count, last = count + 1, NEXT[last]
        num_accepted, num_proposed = num_accepted + count, num_proposed + limit
        num_left, last = num_left - count - 1, NEXT[last]
    return num_accepted, num_proposed


@pytest.mark.parametrize(("share", "num_drafts"), [(0.0, 1), (0.75, 3)])
def test_drafts_are_accepted_as_often_as_they_are_right(
    share: float, num_drafts: int, make_llm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A wrong layer drafts token 0, which is right behind one token: that one is always known.
    is_right = [NEXT[t] == 0 or random.Random(t).random() < share for t in range(VOCAB)]
    model = make_cyclic(tmp_path, is_right, "float32")
    allow_all(monkeypatch)
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, logprobs=0)
    requests = [([5, 9, token], params) for token in CYCLE[:6]]
    expected, _ = run(make_llm, model, requests, kvcache_block_size=4)
    options = {"kvcache_block_size": 4, **speculating(num_drafts)}
    found, llm = run(make_llm, model, requests, **options)
    assert tokens_of(found) == tokens_of(expected)
    assert all(NEXT[a] == b for tokens, *_ in found for a, b in itertools.pairwise(tokens))
    for (_, _, ours, _), (_, _, theirs, _) in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            (token, value), *_ = one.items()
            assert value.logprob == pytest.approx(other[token].logprob, abs=1e-5)
    counts = [implied_counts(NEXT[t], 49, is_right, num_drafts) for t in CYCLE[:6]]
    implied = [sum(column) for column in zip(*counts, strict=True)]
    assert [*acceptance(llm)] == implied


def test_what_is_refused(
    model: str, random_model: str, shared_checkpoint: Any, make_llm: Any, tmp_path: Path
) -> None:
    bare = shared_checkpoint(**STATEFUL)
    without = copy_checkpoint(bare, tmp_path / "without", mtp_num_hidden_layers=0)
    for path in (bare, without):
        match = r"mtp needs the tensors mtp\.fc\.weight, mtp\.norm"
        with pytest.raises(CheckpointError, match=match):
            make_llm(path, **speculating())
    with pytest.raises(UnsupportedModelError, match="mtp is not supported for Qwen3ForCausalLM"):
        make_llm(random_model, **speculating())
    for key, value in (("mtp_num_hidden_layers", 2), ("mtp_use_dedicated_embeddings", True)):
        changed = copy_checkpoint(model, tmp_path / key, **{key: value})
        with pytest.raises(UnsupportedModelError, match=rf"{key} {value} is not supported with"):
            make_llm(changed, **speculating())
