"""Layers with state: each request gets the tokens it gets alone, and hits are right and early.

Imports no torch.
"""

import random
from typing import Any

import pytest

from nanovllm.core.messages import Schedule
from nanovllm.core.sequence import Sequence
from nanovllm.kv.groups.state import ROOM_TO_GROW, State, StateGroup
from nanovllm.kv.trie import Node
from nanovllm.testing.fake_engine import VOCAB_SIZE, FakeEngine, random_guesses
from nanovllm.testing.invariants import check_scheduler
from tests.scheduler.test_random_runs import clock

__all__ = ["clock"]


def make_engine(**options: Any) -> FakeEngine:
    """Return an engine whose pool is large, unless `options` say otherwise."""
    sizes = {"num_blocks": 400, "block_size": 4, "max_model_len": 200, "snapshot_interval": 1000}
    return FakeEngine(**{**sizes, "state_pages": 5, **options})


def states_of(engine: FakeEngine) -> StateGroup:
    assert engine.states is not None
    return engine.states


def uids_of(engine: FakeEngine, pages: list[int]) -> list[int]:
    """Return the uids of the nodes whose blocks are in `pages`."""
    nodes = [engine.manager.blocks[page].entry for page in pages]
    return [node.uid for node in nodes if isinstance(node, Node)]


def state_of(engine: FakeEngine, seq: Sequence) -> State:
    return states_of(engine)._states[seq]


def random_prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=length)


def schedules(engine: FakeEngine) -> list[Schedule]:
    return [schedule for schedule, _ in engine.launched]


def spans(engine: FakeEngine, seq: Sequence) -> list[tuple[int, int]]:
    """Return (start, number of tokens) of a sequence's rows of more than one token."""
    rows = [row for schedule in schedules(engine) for row in schedule.rows]
    return [
        (row.num_computed_tokens, row.num_scheduled_tokens)
        for row in rows
        if row.seq_id == seq.seq_id and row.num_scheduled_tokens > 1
    ]


def num_copies(engine: FakeEngine) -> int:
    return sum(len(schedule.copies) for schedule in schedules(engine))


def test_a_prompt_ends_rows_at_its_snapshots() -> None:
    engine = make_engine(snapshot_interval=8, max_num_batched_tokens=11)
    seq = engine.add(random_prompt(0, 31), max_tokens=1)
    engine.run()
    assert spans(engine, seq) == [(0, 8), (8, 8), (16, 8), (24, 4), (28, 3)]
    assert num_copies(engine) == 4
    budgets = make_engine(max_num_batched_tokens=11)
    seq = budgets.add(random_prompt(0, 31), max_tokens=1)
    budgets.run()
    assert spans(budgets, seq) == [(0, 11), (11, 11), (22, 6), (28, 3)]
    assert num_copies(budgets) == 1


def test_rows_that_end_early_leave_tokens_to_the_next_prompts() -> None:
    """They do so for all users; later steps go on in the same order."""
    engine = make_engine(snapshot_interval=8, max_num_batched_tokens=60)
    for i in range(4):
        engine.add(random_prompt(i, 30), max_tokens=1, user="ab"[i % 2])
    engine.run()
    starts = [[(row.seq_id, row.num_computed_tokens) for row in s.rows] for s in schedules(engine)]
    # Users take turns: sequences 0 and 2 are of one user.
    assert starts == [[(i, start) for i in range(4)] for start in (0, 8, 16, 24, 28)]


def test_without_the_prefix_cache_nothing_is_copied() -> None:
    engine = make_engine(snapshot_interval=8, prefix_caching=False)
    seq = engine.add(random_prompt(0, 31), max_tokens=40, ignore_eos=True)
    engine.run()
    assert spans(engine, seq) == [(0, 31)]
    assert num_copies(engine) == 0


@pytest.mark.parametrize("queue_depth", [0, 2])
@pytest.mark.parametrize("length", [80, 81])
def test_the_next_turn_hits_the_end_of_the_last(queue_depth: int, length: int) -> None:
    engine = make_engine(queue_depth=queue_depth)
    first = engine.add(random_prompt(1, 21), max_tokens=length - 21, ignore_eos=True)
    engine.run()
    second = engine.add(first.token_ids + random_prompt(2, 5), max_tokens=30)
    engine.run()
    assert second.num_cached_tokens == (length - 1) // 4 * 4


def test_a_shared_prefix_hits_where_the_prompts_part() -> None:
    """The second prompt shows where. Until then the snapshots at intervals help."""
    engine = make_engine(snapshot_interval=16)
    prefix = random_prompt(3, 60)
    hits = []
    for i in range(3):
        seq = engine.add([*prefix, *random_prompt(10 + i, 21)], max_tokens=3)
        engine.run()
        hits.append(seq.num_cached_tokens)
    assert hits == [0, 48, 60]


@pytest.mark.parametrize("queue_depth", [0, 1])
def test_a_failed_step_costs_a_few_tokens(queue_depth: int) -> None:
    """Those behind the last rolling snapshot, and the one before if that was being made."""
    engine = make_engine(queue_depth=queue_depth)
    seq = engine.add(random_prompt(1, 21), max_tokens=100, ignore_eos=True)
    for _ in range(8):
        for _ in range(7):
            engine.step()
        length = len(seq.token_ids)
        engine.worker.is_broken = True
        engine.step()
        engine.step_until(lambda: seq.table_idx is not None)
        start = [row for s in schedules(engine) for row in s.rows][-1].num_computed_tokens
        assert length - start <= 4 + 4 * (queue_depth + 1)
    engine.run()


def test_a_long_generation_holds_one_snapshot() -> None:
    engine = make_engine(queue_depth=1)
    seq = engine.add(random_prompt(0, 21), max_tokens=150, ignore_eos=True)
    while not seq.is_finished:
        engine.step()
        check_scheduler(engine.scheduler)
        assert len(states_of(engine)._held) <= 1
    positions = sorted(s.position for s in states_of(engine)._snapshots.values())
    assert positions == [20, 168]
    engine.run()


def test_the_state_of_an_ended_sequence_becomes_a_snapshot() -> None:
    """Nothing is copied. The rolling one before it is no more."""
    engine = make_engine()
    seq = engine.add(random_prompt(0, 21), max_tokens=8, ignore_eos=True)
    engine.step()
    pages = state_of(engine, seq).pages
    engine.run()
    snapshots = {s.position: s for s in states_of(engine)._snapshots.values()}
    assert snapshots.keys() == {20, 28}
    assert snapshots[28].pages == pages
    assert num_copies(engine) == 2  # of 20 and of 24


def test_a_full_pool_has_no_rolling_snapshots() -> None:
    """They take no page that a sequence needs, and are not tried again and again."""
    options = {
        "num_blocks": 4 * (5 + 10) + 6,
        "max_num_batched_tokens": 100,
        "prefix_caching": True,
    }
    engine = make_engine(**options)
    seqs = [engine.add(random_prompt(i, 19), max_tokens=21, ignore_eos=True) for i in range(4)]
    engine.run()
    assert engine.preempted == []
    plain = make_engine(**{**options, "prefix_caching": False})
    for i in range(4):
        plain.add(random_prompt(i, 19), max_tokens=21, ignore_eos=True)
    plain.run()
    assert len(engine.launched) == len(plain.launched) + 1  # the prompts' snapshots
    rolling = num_copies(engine) - 4
    assert rolling <= 4
    assert all(len(seq.token_ids) == 40 for seq in seqs)


@pytest.mark.parametrize("num_blocks_of_prompt", [37, 41])
def test_no_sequence_waits_for_a_rolling_snapshot(num_blocks_of_prompt: int) -> None:
    """The second prompt fits without the snapshot: at once, or until both have grown."""
    engine = make_engine(num_blocks=64)
    first = engine.add(random_prompt(0, 21), max_tokens=24, ignore_eos=True)
    engine.step_until(lambda: len(first.token_ids) == 42)
    states = states_of(engine)
    assert (len(first.kv.block_table), len(states._held), len(engine.manager.pool.free)) == (
        11,
        1,
        43,
    )
    second = engine.add(random_prompt(1, num_blocks_of_prompt * 4 - 1), max_tokens=4)
    engine.step()
    assert second.table_idx is not None
    assert len(states._held) == (num_blocks_of_prompt == 37)
    engine.run()
    assert engine.preempted == []


def test_a_hit_takes_its_snapshot_where_pages_are_short() -> None:
    engine = make_engine(num_blocks=12 + 5, max_model_len=48, max_num_seqs=1)
    first = engine.add(random_prompt(0, 21), max_tokens=8, ignore_eos=True)
    engine.run()
    (pages,) = [s.pages for s in states_of(engine)._snapshots.values() if s.position == 28]
    second = engine.add([*first.token_ids, *random_prompt(1, 17)], max_tokens=2)
    engine.step()
    assert second.num_cached_tokens == 28
    assert state_of(engine, second).pages == pages
    assert engine.launched[-1][0].copies == []
    engine.run()


@pytest.mark.parametrize("queue_depth", [0, 1])
def test_what_an_error_ends_leaves_the_cache(queue_depth: int) -> None:
    """Also snapshots that are cached behind another sequence's blocks."""
    engine = make_engine(queue_depth=queue_depth, snapshot_interval=16)
    states = states_of(engine)
    prompt = random_prompt(5, 38)
    holder = engine.add(prompt, max_tokens=100, ignore_eos=True)
    engine.step_until(lambda: holder.num_output_tokens > 4)
    uids = uids_of(engine, holder.kv.block_table[:9])
    for uid in uids:
        if uid in states._snapshots:
            states.drop(states._snapshots[uid], evicted=False)
    seq = engine.add(prompt, max_tokens=50, ignore_eos=True)
    engine.worker.fails_from[seq.seq_id] = 48
    engine.step_until(lambda: uids[8] in states._snapshots)
    assert seq.num_cached_tokens == 0
    engine.step_until(lambda: seq.is_finished)
    assert seq.output.finish_reason == "error"
    assert not any(uid in states._snapshots for uid in uids)
    assert uids_of(engine, holder.kv.block_table[:9]) == uids
    engine.run()


def test_speculation_takes_rolling_snapshots_of_certain_tokens() -> None:
    engine = make_engine(propose=random_guesses(3), queue_depth=1)
    first = engine.add(random_prompt(1, 21), max_tokens=140, ignore_eos=True)
    engine.run()
    assert engine.num_drafts_accepted > 20
    second = engine.add(first.token_ids + random_prompt(2, 5), max_tokens=30)
    engine.run()
    assert second.num_cached_tokens is not None
    assert 60 < second.num_cached_tokens <= 160


@pytest.mark.parametrize(
    ("max_tokens", "num_spare", "num_running"),
    [(20, 0, 1), (20, ROOM_TO_GROW - 1, 1), (20, ROOM_TO_GROW, 2), (6, 0, 1), (6, 1, 2), (2, 0, 2)],
)
def test_an_admission_leaves_the_others_room_to_grow(
    max_tokens: int, num_spare: int, num_running: int
) -> None:
    engine = make_engine(num_blocks=2 * (6 + 5) + num_spare, max_model_len=48)
    for number in range(2):
        engine.add(random_prompt(number, 22), max_tokens=max_tokens, ignore_eos=True)
    engine.step()
    assert len(engine.scheduler.running) == num_running
    engine.run()
