"""Adapters beside other options: tiers, draft networks, checkpoints in few bits."""

import random
from pathlib import Path
from typing import Any

import pytest

from nanovllm import SamplingParams, demo_model
from tests.checkpoints import make_fp8_checkpoint
from tests.helpers import random_prompt
from tests.lora.adapters import linears_of, write_adapter
from tests.lora.test_equality import OPTIONS, ask, bits, mixed, request

SHORT = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)


def test_tiers_keep_the_kv_of_each_adapter(
    make_llm: Any, random_model: str, tmp_path: Path
) -> None:
    """In host memory: what comes back is of the same adapter, bit for bit."""
    paths = [write_adapter(tmp_path / str(i), linears_of(random_model), seed=i) for i in range(2)]
    asked = mixed(paths, 12)
    options = {**OPTIONS, "dtype": "bfloat16", "num_kvcache_blocks": 12}
    plain = make_llm(random_model, **options, enable_prefix_caching=False)
    tiered = make_llm(random_model, **options, kv_offload_gib=0.01)
    expected = bits(ask(plain, asked, SHORT))
    for _ in range(2):
        assert bits(ask(tiered, asked, SHORT)) == expected


@pytest.mark.parametrize("method", ["draft_model", pytest.param("eagle3", marks=pytest.mark.long)])
def test_draft_networks_have_no_adapter(make_llm: Any, tmp_path: Path, method: str) -> None:
    """Their proposals are verified with the adapter."""
    path = write_adapter(tmp_path, linears_of(demo_model.MODEL), r=4)
    entries = [" ".join(entry) for entry in demo_model.entries()[:4]]
    draft = demo_model.DRAFT_MODEL if method == "draft_model" else demo_model.EAGLE3
    speculation = {"speculative_config": {"method": method, "model": draft}}
    asked = [(entry, adapter) for entry in entries for adapter in (None, request(path))]
    expected = ask(make_llm(demo_model.MODEL, **OPTIONS), asked, SHORT)
    found = ask(make_llm(demo_model.MODEL, **OPTIONS, **speculation), asked, SHORT)
    assert [o.token_ids for o in found] == [o.token_ids for o in expected]


def test_a_checkpoint_in_few_bits(make_llm: Any, random_model: str, tmp_path: Path) -> None:
    model, _ = make_fp8_checkpoint(random_model, tmp_path / "fp8", "channels")
    path = write_adapter(tmp_path / "adapter", linears_of(random_model))
    asked = mixed([path], 8)
    options = {**OPTIONS, "dtype": "float32"}
    llm = make_llm(model, **options)
    found = ask(llm, asked, SHORT)
    assert all(output.outputs[0].finish_reason == "length" for output in found)
    prompt = random_prompt(random.Random(0), 20)
    with_adapter, without = ask(llm, [(prompt, request(path)), (prompt, None)], SHORT)
    assert with_adapter.token_ids != without.token_ids
