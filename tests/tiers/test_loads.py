"""Sequences that load: what they wait for, what they get, and what others do meanwhile.

Imports no torch.
"""

import random
from hashlib import sha256
from typing import Any

import pytest

from nanovllm.core.messages import Schedule, Transfers
from nanovllm.core.sequence import Sequence
from nanovllm.core.worker_info import WindowSpec
from nanovllm.kv.trie import Node
from nanovllm.testing.fake_engine import VOCAB_SIZE
from tests.tiers.fake_tiers import FakeStore, TieredEngine

KINDS: dict[str, dict[str, Any]] = {
    "blocks": {},
    "windows": {"windows": (WindowSpec(5, 2), WindowSpec(9, 1))},
    "states": {"state_pages": 3},
    "mixture": {"windows": (WindowSpec(5, 2), WindowSpec(9, 1)), "state_pages": 3},
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def make_engine(kind: str = "blocks", **options: Any) -> TieredEngine:
    """Return an engine whose pool is large, unless `options` say otherwise."""
    sizes = {"num_blocks": 300, "block_size": 4, "max_model_len": 100, "snapshot_interval": 16}
    return TieredEngine(**{**sizes, **KINDS[kind], **options})


def text(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=length)


def finish(engine: TieredEngine) -> None:
    """Run all, and write all that is to be written."""
    engine.run()
    engine.worker.finish_writes()


def store_with(prompt: list[int], kind: str = "blocks", **options: Any) -> FakeStore:
    """Return the store of a process that computed `prompt`."""
    store = FakeStore()
    first = make_engine(kind, store=store, **options)
    first.add(prompt, max_tokens=1)
    finish(first)
    return store


def slow_loads(engine: TieredEngine) -> None:
    """Let no load end by itself."""
    engine.worker.rng.choice = lambda _: 10**6  # type: ignore[method-assign,assignment]


def end_loads(engine: TieredEngine) -> None:
    """Let all loads end in the next step."""
    for load in engine.worker.loads:
        load.num_steps = 0


def moved(schedule: Schedule | None) -> tuple[Schedule, Transfers]:
    assert schedule is not None
    assert schedule.transfers is not None
    return schedule, schedule.transfers


def num_computed(engine: TieredEngine, seq: Sequence) -> int:
    """Return how many tokens all rows of a sequence have computed."""
    rows = [row for schedule, _ in engine.launched for row in schedule.rows]
    return sum(row.num_scheduled_tokens for row in rows if row.seq_id == seq.seq_id)


@each_kind
def test_the_next_process_loads_a_prompt(kind: str) -> None:
    store = store_with(text(0, 40), kind)
    engine = make_engine(kind, store=store)
    seq = engine.add(text(0, 40), max_tokens=3)
    engine.run()
    assert seq.num_cached_tokens == 36
    assert num_computed(engine, seq) == 4 + 2
    assert engine.traffic.stats.num_store_tokens == 36
    assert engine.traffic.stats.num_host_tokens == 0


def test_a_step_waits_if_there_is_nothing_else_to_do() -> None:
    engine = make_engine(store=store_with(text(0, 40)))
    slow_loads(engine)
    engine.add(text(0, 40), max_tokens=2)
    schedule, transfers = moved(engine.launch())
    assert schedule.rows == []
    assert len(schedule.admissions) == len(transfers.loads) == 1
    assert transfers.awaited
    engine.run()


def test_no_step_waits_while_another_is_in_flight() -> None:
    """Symptom: the tokens of a step that has ended are late by a whole load."""
    engine = make_engine(store=store_with(text(0, 40)), queue_depth=1)
    slow_loads(engine)
    engine.add(text(1, 10), max_tokens=2)
    engine.launch()
    engine.add(text(0, 40), max_tokens=2)
    _, transfers = moved(engine.launch())
    assert transfers.loads
    assert not transfers.awaited
    engine.run()


@each_kind
@pytest.mark.parametrize("index", [0, 3, 8])
def test_a_wrong_part_costs_time_alone(kind: str, index: int) -> None:
    store = store_with(text(0, 40), kind)
    block = [key for key in store.entries if len(key) == 32][index]
    damaged = max(key for key in store.entries if key.startswith(block))  # if there is more than KV
    store.entries[damaged if index == 8 else block] = None
    engine = make_engine(kind, store=store)
    seq = engine.add(text(0, 40), max_tokens=3)
    finish(engine)
    assert seq.num_output_tokens == 3
    assert engine.traffic.stats.num_failed_loads == 1
    assert engine.scheduler.stats.num_preemptions == 0
    assert None not in store.entries.values()  # what was damaged is written again


@each_kind
def test_evicted_blocks_come_back_from_host_memory(kind: str) -> None:
    num_blocks = 46 if kind == "mixture" else 40
    engine = make_engine(kind, num_blocks=num_blocks, num_host_slots=500)
    first = engine.add(text(0, 40), max_tokens=1)
    engine.run()
    for seed in range(1, 5):
        engine.add(text(seed, 40), max_tokens=1)
        engine.run()
    again = engine.add(text(0, 40), max_tokens=1)
    engine.run()
    assert again.num_cached_tokens == 36
    assert num_computed(engine, first) == 40
    assert num_computed(engine, again) == 4
    assert engine.traffic.stats.num_host_tokens == 36


@pytest.mark.parametrize("kind", ["windows", "mixture"])
def test_window_blocks_come_back_to_blocks_that_the_pool_has(kind: str) -> None:
    """And they are cached again: the next sequence need not load them."""
    engine = make_engine(kind, num_host_slots=500)
    first = engine.add(text(0, 40), max_tokens=1)
    engine.run()
    nodes = engine.manager.match_prefix(first).nodes[:9]
    assert len(nodes) == 9
    for group in engine.window_groups:
        for node in nodes:
            if group.has(node):
                group.forget(node, evicted=True)
    assert engine.manager.match_prefix(first).num_blocks == 0
    other = engine.add(text(1, 8), max_tokens=1)  # its step copies them to host memory
    engine.run()
    assert other.is_finished
    for num_loads in (1, 1):
        again = engine.add(text(0, 40), max_tokens=1)
        engine.run()
        assert again.num_cached_tokens == 36
        assert engine.traffic.stats.num_loads == num_loads
    assert all(group.has(nodes[-1]) for group in engine.window_groups)


@pytest.mark.parametrize(("kind", "num_blocks"), [("blocks", 50), ("windows", 75)])
def test_a_preempted_sequence_is_swapped(kind: str, num_blocks: int) -> None:
    computed = []
    for num_host_slots in (0, 500):
        engine = make_engine(kind, num_blocks=num_blocks, num_host_slots=num_host_slots)
        seqs = [engine.add(text(seed, 20), max_tokens=70, ignore_eos=True) for seed in range(3)]
        engine.run()
        assert engine.scheduler.stats.num_preemptions
        computed.append(sum(num_computed(engine, seq) for seq in seqs))
        assert bool(engine.traffic.stats.num_swapped_tokens) == bool(num_host_slots)
    assert computed[1] < computed[0]
    assert computed[1] < 3 * (20 + 70) + 60


def test_prompts_that_begin_alike_load_once() -> None:
    """Symptom: 64 requests with one system prompt each load it, and fill the pool."""
    engine = make_engine(store=store_with(text(0, 40)), max_num_seqs=8)
    seqs = [engine.add([*text(0, 40), number % 5], max_tokens=2) for number in range(6)]
    other = engine.add(text(1, 40), max_tokens=1, user="ann")
    slow_loads(engine)
    engine.step()
    assert len(engine.loads._loading) == 1
    assert num_computed(engine, other) == 40
    engine.run()
    assert engine.traffic.stats.num_loads == 1
    assert [seq.num_cached_tokens for seq in seqs] == [40] * 6


@each_kind
def test_a_reset_hides_what_the_tiers_have(kind: str) -> None:
    engine = make_engine(kind, store=store_with(text(0, 40), kind), num_host_slots=100)
    engine.add(text(0, 40), max_tokens=1)
    engine.run()
    assert engine.manager.reset_prefix_cache()
    seqs = []
    for _ in range(2):
        seqs.append(engine.add(text(0, 40), max_tokens=1))
        engine.run()
    assert [seq.num_cached_tokens for seq in seqs] == [0, 36]


@each_kind
def test_a_load_for_nobody_ends_before_its_pages_are_reused(kind: str) -> None:
    engine = make_engine(kind, store=store_with(text(0, 40), kind))
    slow_loads(engine)
    other = engine.add(text(1, 10), max_tokens=20)
    engine.step()
    seq = engine.add(text(0, 40), max_tokens=1)
    engine.step()
    (load,) = engine.worker.loads
    engine.abort(seq)
    assert not seq.num_cached_tokens
    assert len(engine.loads._loading) == 0
    assert engine.scheduler.stats.num_prompt_tokens == other.num_prompt_tokens
    _, transfers = moved(engine.launch())
    pages = {page for part in load.load.parts for page in part.pages}
    assert pages <= {*transfers.released}
    engine.run()
    assert other.is_finished


def test_a_snapshot_that_is_being_written_is_not_taken_over_before() -> None:
    """Symptom: a hit writes to the pages of its snapshot while the store reads them."""
    engine = make_engine("states", store=FakeStore(), num_blocks=15, max_model_len=48)
    engine.worker.rng.random = lambda: 0.9  # type: ignore[method-assign]  # writes are slow
    first = engine.add(text(0, 21), max_tokens=1)
    engine.run()
    assert engine.states is not None
    snapshots = [s for s in engine.states._snapshots.values() if s.position == 20]
    (pages,) = (snapshot.pages for snapshot in snapshots)
    assert any(write.part.pages == pages for write in engine.worker.writes)
    engine.add([*first.token_ids[:21], *text(1, 20)], max_tokens=1)
    schedule, transfers = moved(engine.launch())
    assert schedule.copies == []
    assert {*pages} <= {*transfers.released}
    engine.run()


@each_kind
def test_a_failed_step_ends_all_loads(kind: str) -> None:
    """Symptom: the news of an ended load was in the result that is lost, and nobody waits on."""
    engine = make_engine(kind, store=store_with(text(0, 40), kind))
    slow_loads(engine)
    engine.add(text(1, 10), max_tokens=20)
    engine.step()
    seq = engine.add(text(0, 40), max_tokens=1)
    engine.step()
    assert len(engine.loads._loading) == 1
    engine.worker.is_broken = True
    engine.step()
    assert len(engine.loads._loading) == 0
    engine.run()
    assert seq.num_cached_tokens == 36


def test_a_step_behind_the_last_one_begins_to_write() -> None:
    """Symptom: the prompt of a request with one output token is not kept."""
    store = FakeStore()
    engine = make_engine(store=store)
    engine.add(text(0, 40), max_tokens=1)
    engine.step()
    assert not engine.scheduler.running
    assert engine.scheduler.num_unfinished == 1
    schedule, transfers = moved(engine.launch())
    assert schedule.rows == []
    assert len(transfers.stores) == 10
    assert engine.scheduler.num_unfinished == 0


def test_answers_are_kept_once_they_are_prompts() -> None:
    """Symptom: a chat's third turn finds the first turn alone in the store."""
    store = FakeStore()
    engine = make_engine(store=store)
    first = engine.add(text(0, 20), max_tokens=20, ignore_eos=True)
    finish(engine)
    assert len(store.entries) == 5
    second = engine.add([*first.token_ids, 1, 2, 3, 4], max_tokens=1)
    finish(engine)
    assert second.num_cached_tokens == 36
    assert len(store.entries) == 11


@each_kind
def test_what_a_failed_sequence_had_is_not_kept_again(kind: str) -> None:
    """The model may give NaN for this prompt each time."""
    store = FakeStore()
    engine = make_engine(kind, store=store, num_host_slots=100)
    seq = engine.add(text(0, 40), max_tokens=4)
    engine.worker.fails_from[seq.seq_id] = 41
    finish(engine)
    engine.add(text(0, 40), max_tokens=1)
    finish(engine)
    assert not any(engine.traffic.find(key) for key in store.entries)


def test_memory_of_failed_sequences_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of their blocks is found or kept again. If they are too many, all is forgotten."""
    engine = make_engine(store=FakeStore(), num_host_slots=100)
    tiers = engine.loads.cache
    trie = engine.manager.trie
    full = engine.manager.full

    def node(number: int) -> Node:
        return Node(trie, number, (0, sha256(number.to_bytes(4, "big")).digest()), b"", 0)

    def num_kept(numbers: range) -> int:
        """Offer blocks to host memory and to the store; return how many are found then."""
        count = 0
        for number in numbers:
            tiers.evicted(node(number), full.suffix, [number])
            tiers.written(node(number), full.suffix, [number])
            count += tiers._find(node(number).key[1], 0, full) is not None
        return count

    assert num_kept(range(100)) == 100
    tiers.distrusted(list(map(node, range(50))))
    assert num_kept(range(100)) == 50
    monkeypatch.setattr("nanovllm.features.tiers.cache._MAX_DISTRUSTED", 500)
    for number in range(100, 1000):
        tiers.distrusted([node(number)])
        assert len(tiers._distrusted) <= 500
    assert not any(tiers._find(node(number).key[1], 0, full) for number in range(100))
    tiers.cleared()
    assert num_kept(range(100)) == 100


def test_a_slow_tier_is_not_used() -> None:
    engine = make_engine(store=store_with(text(0, 40)), token_seconds=0.001)
    engine.traffic.tiers[0].page_seconds = 0.005  # a block of 4 tokens takes 0.004 to compute
    seqs = [engine.add(text(0, 40), max_tokens=1)]
    engine.run()
    assert seqs[0].num_cached_tokens == 0
