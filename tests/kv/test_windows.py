"""Window groups: each request gets the tokens it gets alone, and holds only its window.

Imports no torch.
"""

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import initialize

from nanovllm.core.sequence import Sequence
from nanovllm.core.windows import WindowSpec, num_tables, pages_for
from nanovllm.core.worker_info import KVInfo, WorkerInfo
from nanovllm.engine.engine_metrics import kv_cache_tokens
from nanovllm.kv.groups.window import WindowTable
from nanovllm.kv.trie import Node
from nanovllm.testing.fake_engine import VOCAB_SIZE, FakeEngine, random_guesses, random_limits
from nanovllm.testing.invariants import check_scheduler
from nanovllm.testing.random_runs import SchedulerMachine, make_controller
from tests.every_case import examples
from tests.scheduler.test_random_runs import clock

__all__ = ["clock"]

GROUPS = st.lists(
    st.builds(WindowSpec, st.sampled_from([1, 2, 3, 5, 8, 40]), st.sampled_from([1, 3])),
    min_size=1,
    max_size=2,
)


class WindowsMachine(SchedulerMachine):
    """Random runs of a model with window groups, with drafts or without."""

    @initialize(
        max_model_len=st.integers(2, 24),
        block_size=st.integers(1, 5),
        windows=GROUPS,
        num_spare_blocks=st.integers(0, 12),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.integers(1, 12),
        eos_token_ids=st.sampled_from([(), (3,), (3, 4)]),
        prefix_caching=st.sampled_from([True, True, False]),
        queue_depth=st.sampled_from([0, 1, 1, 2, 4]),
        seed=st.integers(0, 2**32),
        with_drafts=st.booleans(),
        follows_drafts=st.booleans(),
    )
    def start(  # type: ignore[override]
        self,
        max_model_len: int,
        block_size: int,
        windows: list[WindowSpec],
        num_spare_blocks: int,
        max_num_batched_tokens: int,
        eos_token_ids: tuple[int, ...],
        seed: int,
        with_drafts: bool,
        **options: Any,
    ) -> None:
        num_pages = pages_for(max_model_len, block_size, windows, max_num_batched_tokens)
        self.engine = FakeEngine(
            num_blocks=num_pages + num_spare_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            windows=tuple(windows),
            eos_token_ids=frozenset(eos_token_ids),
            propose=random_guesses(seed) if with_drafts else None,
            controller=make_controller(seed) if with_drafts else None,
            **options,
        )


WindowsMachine.TestCase.settings = settings(
    max_examples=examples(200), stateful_step_count=40, deadline=None, derandomize=True
)

TestWindows = WindowsMachine.TestCase


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


def test_new_blocks_name_each_cell_once() -> None:
    """Of table t they are behind t * width; table 0's come as in a model without windows."""
    engine = make_engine(WindowSpec(6, 1), WindowSpec(9, 2), max_num_batched_tokens=7)
    seq = engine.add(random_prompt(0, 30), max_tokens=40, ignore_eos=True)
    while not seq.is_finished:
        engine.step()
    schedules = [schedule for schedule, _ in engine.launched]
    assert [len(new.block_ids) for s in schedules for new in s.admissions] == [8]
    cells = [
        (new.table_idx, new.start + i)
        for schedule in schedules
        for new in schedule.new_blocks
        for i in range(len(new.block_ids))
    ]
    width, table_0 = 50, range(8, 18)  # of the 69 tokens that are computed
    others = [table * width + index for table in (1, 2, 3) for index in range(18)]
    assert sorted(cells) == [(0, c) for c in [*table_0, *others]]


@pytest.mark.parametrize("window", [1, 5, 40])
def test_the_next_turn_hits(window: int) -> None:
    engine = make_engine(WindowSpec(window, 3))
    first = engine.add(random_prompt(1, 21), max_tokens=60, ignore_eos=True)
    engine.run()
    second = engine.add(first.token_ids + random_prompt(2, 5), max_tokens=30)
    engine.run()
    assert second.num_cached_tokens == 80


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


def test_what_an_error_ends_leaves_the_cache() -> None:
    """Also window blocks that are cached below another sequence's blocks."""
    engine = make_engine(WindowSpec(5, 2), max_num_batched_tokens=16)
    manager = engine.manager
    prompt = random_prompt(5, 30)
    holder = engine.add(prompt, max_tokens=100, ignore_eos=True)
    engine.step_until(lambda: holder.num_output_tokens > 10)
    (group,) = engine.window_groups
    nodes = [manager.blocks[page].entry for page in holder.kv.block_table[3:7]]
    for node in nodes:
        assert isinstance(node, Node)
        group.forget(node, evicted=False)
    seq = engine.add(prompt, max_tokens=50, ignore_eos=True)
    engine.worker.fails_from[seq.seq_id] = 45
    engine.step_until(lambda: group.has(nodes[-1]))
    assert seq.num_cached_tokens == 12
    engine.step_until(lambda: seq.is_finished)
    assert seq.output.finish_reason == "error"
    assert not any(group.has(node) for node in nodes)
    assert [manager.blocks[page].entry for page in holder.kv.block_table[3:7]] == nodes
    engine.run()


@pytest.mark.parametrize("queue_depth", [0, 1, 3])
@pytest.mark.parametrize(("window", "chunk"), [(1, 1), (6, 4), (3, 9), (30, 5), (90, 16)])
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


@pytest.mark.parametrize("seed", range(6))
def test_rejected_drafts_find_their_window(seed: int) -> None:
    """Where pages are short, they are freed while drafts in flight may still be rejected."""
    windows = (WindowSpec(1 + seed % 4, 2),)
    engine = make_engine(
        *windows,
        num_blocks=pages_for(60, 1, windows, 8) + seed,
        block_size=1,
        max_model_len=60,
        max_num_batched_tokens=8,
        queue_depth=2,
        propose=random_guesses(seed),
        controller=random_limits(seed),
        follows_drafts=True,
    )
    seqs = [engine.add(random_prompt(i, 10), max_tokens=40, ignore_eos=True) for i in range(3)]
    while not all(seq.is_finished for seq in seqs):
        engine.step()
        check_scheduler(engine.scheduler)
    engine.run()
    assert engine.num_followers > 0


def test_pages_of_one_sequence() -> None:
    windows = WindowSpec(512, 5), WindowSpec(10**6, 2)
    assert num_tables(windows) == 8
    assert pages_for(1000, 256, (), 64) == 4
    assert pages_for(1000, 256, windows[:1], 64) == 4 + 5 * 4
    assert pages_for(100_000, 256, windows, 64) == 391 + 5 * 4 + 2 * 391
    assert pages_for(0, 256, windows, 64) == 0


def test_the_tokens_that_a_pool_holds() -> None:
    """Group 0 has 16 blocks of 64 tokens; a window of 100 tokens and the next are in 3 of them."""
    info = WorkerInfo(1000, 64, 1024, 50, 64)
    assert kv_cache_tokens(info) == 64_000
    info = dataclasses.replace(info, kv=KVInfo((WindowSpec(100, 5),)))
    assert kv_cache_tokens(info) == 1000 * 1024 // (16 + 5 * 3)
    info = dataclasses.replace(info, kv=KVInfo(state_pages=4))
    assert kv_cache_tokens(info) == 1000 * 1024 // (16 + 4)
