"""Where the states of layers lie: in which pages, whose they are, and their copies."""

import random
from itertools import pairwise

import pytest
import torch
from torch import nn

from nanovllm.core.messages import NewBlocks, Row, Schedule
from nanovllm.core.worker_info import KVInfo, WorkerInfo
from nanovllm.kernels.states import StatePart
from nanovllm.kernels.torch_kernels import TORCH
from nanovllm.layers.state_layer import StateLayer
from nanovllm.platform.cpu import CPU as CPUPlatform
from nanovllm.worker.device_tables import DeviceTables
from nanovllm.worker.kv_pool import KVPool, page_layout
from nanovllm.worker.state_layers import StateLayers, pack_parts
from tests.kernels.state_cases import part_of

CPU = torch.device("cpu")


def random_parts(seed: int) -> list[StatePart]:
    chooser = random.Random(seed)
    sizes = [(chooser.randint(1, 9), chooser.randint(1, 40)) for _ in range(4)]
    return [
        StatePart(chooser.choice(sizes), chooser.choice([torch.float32, torch.bfloat16]))
        for _ in range(chooser.randint(1, 60))
    ]


@pytest.mark.parametrize("seed", range(20))
def test_parts_lie_in_the_first_page_with_room(seed: int) -> None:
    parts = random_parts(seed)
    largest = max(-(-part.nbytes // 64) * 64 for part in parts)
    page_bytes = largest + 64 * random.Random(seed).randint(0, 30)
    places, num_pages = pack_parts(parts, page_bytes)
    used: list[int] = []
    for part, (column, offset) in zip(parts, places, strict=True):
        size = -(-part.nbytes // 64) * 64
        fitting = [i for i, end in enumerate(used) if end + size <= page_bytes]
        used += [] if fitting else [0]
        expected = fitting[0] if fitting else len(used) - 1
        assert (column, offset) == (expected, used[expected])
        used[expected] += size
    assert num_pages == len(used)
    places.sort()
    assert all(first < second for first, second in pairwise(places))


def test_each_layer_gets_its_own_parts() -> None:
    """What a layer writes for a sequence is in no other layer, no other sequence, and no KV."""
    layers = [random_parts(seed) for seed in range(3)]
    model = nn.ModuleList(StateLayer(tuple(parts)) for parts in layers)
    states = StateLayers(model)
    layout = page_layout([640, 128], [None, None], states.largest_part)
    states.lay_out(layout.page_bytes)
    num_pages = states.num_pages
    assert states.num_bytes == sum(part.nbytes for parts in layers for part in parts)
    shapes = [(2, 3 * num_pages + 1, 80), (2, 3 * num_pages + 1, 16)]
    pool = KVPool(layout, shapes, torch.float32, CPUPlatform(), by_page=True)
    states.bind(pool.pages)
    ids = list(range(1, 3 * num_pages + 1))
    random.Random(0).shuffle(ids)
    owned = [ids[:num_pages], ids[num_pages : 2 * num_pages], ids[2 * num_pages :]]
    places = [
        (layer, index, pages)
        for layer in states.layers
        for index in range(len(layer.parts))
        for pages in owned
    ]
    for number, (layer, index, pages) in enumerate(places):
        part_of(layer.states, pages, index).fill_(number % 251)
    for number, (layer, index, pages) in enumerate(places):
        assert (part_of(layer.states, pages, index) == number % 251).all()
    assert all((layer[:, 0] == 0).all() for layer in pool.layers)
    states.unbind()
    assert not any(hasattr(layer, "states") for layer in states.layers)


def test_pages_are_as_large_as_the_largest_part() -> None:
    assert page_layout([640], [None], 64).page_bytes == 640
    assert page_layout([640], [None], 4096).page_bytes == 4096
    assert StateLayers(nn.ModuleList()).largest_part == 0


def test_copies_of_pages() -> None:
    layout = page_layout([64, 64], [None, None])
    pool = KVPool(layout, [(2, 9, 8)] * 2, torch.float32, CPUPlatform(), by_page=True)
    for page in range(9):
        pool.pages[page] = page
    pool.copy([1, 2, 3], [7, 0, 8])
    pool.copy([7], [3])
    assert pool.pages[:, 0].tolist() == [2, 1, 2, 1, 4, 5, 6, 1, 3]
    assert (pool.pages == pool.pages[:, :1]).all()


def test_the_rows_of_a_step_know_their_pages() -> None:
    info = WorkerInfo(100, 4, 24, 50, 64, kv=KVInfo(state_pages=3))
    tables = DeviceTables(info, 4, CPUPlatform(), TORCH)
    unused = tables.batch([Row(0, 2, 0, 1, True)]).state
    assert unused is not None
    assert unused.pages.tolist() == [[97, 98, 99]]  # pages that the pool has
    start = 24 // 4
    new = [NewBlocks(0, start, [7, 3, 90]), NewBlocks(3, start, [1, 0, 2]), NewBlocks(3, 0, [5, 6])]
    tables.apply(Schedule(0, [], new, []))
    rows = [Row(0, 3, 4, 3, True, 2), Row(1, 0, 0, 2, False), Row(2, 3, 8, 1, True)]
    batch = tables.batch(rows)
    state = batch.state
    assert state is not None
    assert state.pages.tolist() == [[1, 0, 2], [7, 3, 90], [1, 0, 2]]
    assert state.cu_seqlens.tolist() == [0, 3, 5, 6]
    assert state.write_lens.tolist() == [1, 2, 1]  # drafts are not certain
    assert {state.pages.dtype, state.cu_seqlens.dtype, state.write_lens.dtype} == {torch.int32}
    assert batch.block_tables[0].tolist() == [5, 6, 0]
    assert DeviceTables(WorkerInfo(100, 4, 24, 50, 64), 4, CPUPlatform(), TORCH).state_table is None
