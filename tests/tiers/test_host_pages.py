"""Copies between the pages of a CPU's pool, host memory and files."""

import pytest
import torch

from nanovllm.features.tiers import host_pages
from nanovllm.features.tiers.host_pages import Buffers, HostPages
from nanovllm.platform.cpu import CPU
from nanovllm.worker.kv_pool import KVPool, page_layout

SHAPE = (2, 6, 4, 2, 8)


def make_pool() -> KVPool:
    layout = page_layout([2 * 4 * 2 * 8 * 2] * 3, [None] * 3)
    pool = KVPool(layout, [SHAPE] * 3, torch.bfloat16, CPU(), by_page=True)
    pool.pages.copy_(torch.randint(256, pool.pages.shape, dtype=torch.uint8))
    return pool


@pytest.mark.parametrize("native", [True, False])
def test_pages_go_to_host_memory_and_come_back(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(host_pages, "library", lambda: None)
    pool = make_pool()
    copies, before = HostPages(pool, 4), pool.pages.clone()
    copies.save([5, 0], [3, 1])
    pool.pages.zero_()
    copies.restore([1, 3], [2, 4], None)
    assert torch.equal(pool.pages[[2, 4]], before[[0, 5]])
    assert not pool.pages[[0, 1, 3, 5]].any()


def test_files_are_read_into_the_pages_and_written_from_them() -> None:
    pool = make_pool()
    copies, before = HostPages(pool, 0), pool.pages.clone()
    kept: list[bytes] = []

    def read(buffers: Buffers) -> bool:
        for buffer, data in zip(buffers, kept, strict=True):
            buffer[:] = data
        return True

    copies.drain([3, 1], None, lambda buffers: kept.extend(map(bytes, buffers)))
    assert kept == [before[3].numpy().tobytes(), before[1].numpy().tobytes()]
    assert copies.fill([0, 5], None, read)
    assert torch.equal(pool.pages[[0, 5]], before[[3, 1]])
