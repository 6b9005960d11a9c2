"""The pages of a CPU's KV pool are there before its blocks are written."""

from typing import Any

import pytest
import torch

from nanovllm import SamplingParams
from nanovllm.worker import kv_pool


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_block_is_one_stretch_of_memory(random_model: str, make_llm: Any, dtype: str) -> None:
    """Symptom: the first token of a block writes to new huge pages in each head of each layer."""
    llm = make_llm(random_model, dtype=dtype, num_kvcache_blocks=3, max_model_len=32)
    network = llm.engine.executor._runner.network
    layers = [attention.kv_cache for attention in network.attention.layers]
    block = torch.stack([layer[:, 1] for layer in layers])
    first = min(layer[:, 1].data_ptr() for layer in layers)
    last = max(
        layer[:, 1][-1, -1, -1].data_ptr() + layer[:, 1][-1, -1, -1].nbytes for layer in layers
    )
    assert last - first == block.nbytes == network.block_bytes


def test_memory_is_ready_ahead_of_the_blocks_in_use(
    random_model: str, make_llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: one token in thousands waits for new pages."""
    populated: list[torch.Tensor] = []
    monkeypatch.setattr(kv_pool, "populate", lambda whole, part: populated.append(part))
    monkeypatch.setattr(kv_pool, "_BYTES_AHEAD", 1)  # one block
    options = {"num_kvcache_blocks": 12, "kvcache_block_size": 4, "max_model_len": 48}
    llm = make_llm(random_model, dtype="float32", **options)
    pool = llm.engine.executor._runner.network.pool
    for num_blocks in (1, 2, 5, 12):
        params = SamplingParams(max_tokens=1, temperature=0.0)
        llm.generate([[5] * (4 * num_blocks - 1)], params, use_tqdm=False)
        assert sum(map(len, populated)) == min(num_blocks + 1, 12)
    assert [block.data_ptr() for part in populated for block in part] == [
        pool._pool[block].data_ptr() for block in range(12)
    ]
