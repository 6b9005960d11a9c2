"""Pages of a pool as rows of bytes, in both ways in which layers share a pool."""

import pytest
import torch

from nanovllm.platform.cpu import CPU
from nanovllm.worker.kv_pool import KVPool, page_layout

SHAPE = (2, 5, 4, 3, 8)


@pytest.mark.parametrize("by_page", [True, False])
def test_pages_are_gathered_and_scattered(by_page: bool) -> None:
    size = 2 * 4 * 3 * 8 * 4
    layout = page_layout([size] * 3, [None] * 3)
    pool = KVPool(layout, [SHAPE] * 3, torch.float32, CPU(), by_page=by_page)
    for layer in pool.layers:
        layer.copy_(torch.randn(SHAPE))
    before = [layer.clone() for layer in pool.layers]
    rows = pool.gather([4, 1])
    assert rows.shape == (2, pool.page_bytes)
    assert pool.page_bytes == 3 * size
    pool.scatter([0, 3], rows)
    for layer, old in zip(pool.layers, before, strict=True):
        assert torch.equal(layer[:, [0, 3]], old[:, [4, 1]])
        assert torch.equal(layer[:, [1, 2, 4]], old[:, [1, 2, 4]])
