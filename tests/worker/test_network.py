"""The pages of a CPU's KV pool are there before its blocks are written."""

from typing import Any

import pytest
import torch

from nanovllm import SamplingParams
from nanovllm.worker import network


def test_memory_is_ready_ahead_of_the_blocks_in_use(
    random_model: str, make_llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: one token in thousands waits for a new huge page in each layer."""
    populated: list[list[torch.Tensor]] = []
    monkeypatch.setattr(network, "populate", lambda whole, parts: populated.append(parts))
    monkeypatch.setattr(network, "HUGE_PAGE", 1)
    options = {"num_kvcache_blocks": 12, "kvcache_block_size": 4, "max_model_len": 48}
    llm = make_llm(random_model, dtype="float32", **options)
    pool = llm.engine.executor._runner.network._pool
    assert len(populated) == 1
    for num_blocks in range(1, 13):
        params = SamplingParams(max_tokens=1, temperature=0.0)
        llm.generate([[5] * (4 * num_blocks - 1)], params, use_tqdm=False)
        assert len(populated) == min(1 + num_blocks, 12)
    addresses = [{part.data_ptr() for part in parts} for parts in populated]
    expected = [{half[block].data_ptr() for layer in pool for half in layer} for block in range(12)]
    assert addresses == expected
