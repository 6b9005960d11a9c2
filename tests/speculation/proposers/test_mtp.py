"""A checkpoint's own layer drafts what transformers' modules do.

tests/test_speculation.py has what all proposers promise.
"""

import random
from pathlib import Path
from typing import Any

import pytest

from nanovllm import SamplingParams
from nanovllm.errors import CheckpointError, UnsupportedModelError
from tests.checkpoints import copy_checkpoint
from tests.helpers import random_prompt
from tests.mtp_checkpoints import STATEFUL, add_mtp
from tests.speculation.proposers.drafting import (
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
