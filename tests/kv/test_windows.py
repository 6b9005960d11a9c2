"""Window groups: each request gets the tokens it gets alone, and holds only its window.

Imports no torch.
"""

import dataclasses
import random
from typing import Any

import pytest

from nanovllm.core.sequence import Sequence
from nanovllm.core.worker_info import KVInfo, WindowSpec, WorkerInfo, pages_for
from nanovllm.engine.engine_metrics import kv_cache_tokens
from nanovllm.kv.groups.window import WindowTable
from nanovllm.testing.fake_engine import VOCAB_SIZE, FakeEngine
from nanovllm.testing.invariants import check_scheduler
from tests.scheduler.test_random_runs import clock

__all__ = ["clock"]


def make_engine(*windows: WindowSpec, **options: Any) -> FakeEngine:
    """Return an engine whose pool is large, unless `options` say otherwise."""
    sizes = {"num_blocks": 400, "block_size": 4, "max_model_len": 200, **options}
    return FakeEngine(windows=windows, **sizes)


def window_tables(engine: FakeEngine, seq: Sequence) -> list[WindowTable]:
    return [group._tables[seq] for group in engine.window_groups]


def random_prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=length)


def num_held(engine: FakeEngine) -> int:
    return len(engine.manager.blocks) - engine.manager.num_free_blocks


@pytest.mark.parametrize("queue_depth", [0, 1])
def test_a_long_generation_holds_its_window(queue_depth: int) -> None:
    groups = WindowSpec(10, 1), WindowSpec(3, 3)
    engine = make_engine(*groups, max_num_batched_tokens=8, queue_depth=queue_depth)
    seq = engine.add(random_prompt(0, 60), max_tokens=130, ignore_eos=True)
    most = [0, 0]
    while not seq.is_finished:
        engine.step()
        if seq.table_idx is None:
            continue
        tables = window_tables(engine, seq)
        chunks = (1 + queue_depth) * (8 if seq.is_queued else 1)
        for i, (table, group) in enumerate(zip(tables, groups, strict=True)):
            assert len(table.blocks) <= -(-(group.window + chunks) // 4) + 1
            most[i] = max(most[i], len(table.blocks))
        pages = sum(g.pages * len(t.blocks) for t, g in zip(tables, groups, strict=True))
        assert num_held(engine) == len(seq.kv.block_table) + pages
    assert min(most) >= 2
    engine.run()


def test_a_shared_prefix_hits_when_its_owner_is_far_beyond() -> None:
    """It hits while the owner runs, and when it is gone."""
    engine = make_engine(WindowSpec(7, 2), max_num_batched_tokens=8)
    prefix = random_prompt(3, 40)
    owner = engine.add([*prefix, 0, 1], max_tokens=100, ignore_eos=True)
    engine.step_until(lambda: owner.num_output_tokens > 40)
    others = [engine.add([*prefix, 4, i], max_tokens=20) for i in range(2)]
    engine.run()
    late = engine.add([*prefix, 3, 3], max_tokens=20)
    engine.run()
    assert [seq.num_cached_tokens for seq in (*others, late)] == [40, 40, 40]


def test_a_hit_is_as_long_as_its_window_is_cached() -> None:
    """Only the window before its end counts: blocks further left may be gone."""
    engine = make_engine(WindowSpec(6, 2), WindowSpec(3, 1))
    manager = engine.manager
    tokens = random_prompt(4, 41)
    engine.add(tokens, max_tokens=1)
    engine.run()
    nodes = manager.match_prefix(engine.sequences[0]).nodes
    assert len(nodes) == 10

    def hit() -> int:
        check_scheduler(engine.scheduler)
        return manager.match_prefix(engine.sequences[0]).num_blocks

    def forget(group: int, index: int) -> int:
        engine.window_groups[group].forget(nodes[index], evicted=False)
        return hit()

    assert forget(0, 7) == 10, "token 40 reads 35 and later ones"
    assert forget(1, 8) == 10
    assert forget(0, 8) == 7, "blocks 8 and 9 need block 8, block 7 needs itself"
    assert forget(1, 6) == 6
    assert forget(0, 0) == 6
    assert forget(0, 5) == 5
    assert forget(0, 4) == 4
    assert forget(0, 3) == 3
    assert forget(1, 2) == 0, "both shorter ones need block 0"


@pytest.mark.parametrize("queue_depth", [0, 1])
@pytest.mark.parametrize(("window", "chunk"), [(1, 1), (6, 4), (90, 16)])
@pytest.mark.parametrize("block_size", [1, 4])
def test_the_smallest_pool_holds_one_sequence(
    block_size: int, window: int, chunk: int, queue_depth: int
) -> None:
    """Without the prefix cache nothing but the window's blocks helps it on."""
    windows = WindowSpec(window, 3), WindowSpec(2, 1)
    engine = make_engine(
        *windows,
        num_blocks=pages_for(60, block_size, windows, chunk),
        block_size=block_size,
        max_model_len=60,
        max_num_batched_tokens=chunk,
        queue_depth=queue_depth,
        prefix_caching=False,
    )
    seq = engine.add(random_prompt(0, 50), max_tokens=20, ignore_eos=True)
    engine.run()
    assert len(seq.token_ids) == 60
    assert engine.preempted == []


def test_the_tokens_that_a_pool_holds() -> None:
    """Group 0 has 16 blocks of 64 tokens; a window of 100 tokens and the next are in 3 of them."""
    info = WorkerInfo(1000, 64, 1024, 50, 64)
    assert kv_cache_tokens(info) == 64_000
    info = dataclasses.replace(info, kv=KVInfo((WindowSpec(100, 5),)))
    assert kv_cache_tokens(info) == 1000 * 1024 // (16 + 5 * 3)
    info = dataclasses.replace(info, kv=KVInfo(state_pages=4))
    assert kv_cache_tokens(info) == 1000 * 1024 // (16 + 4)
