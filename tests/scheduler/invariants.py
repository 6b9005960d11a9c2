"""What must hold between two calls of the scheduler or of its block manager. Imports no torch."""

from array import array
from collections import Counter
from collections.abc import Iterable
from itertools import chain

from nanovllm.scheduler.block_manager import BlockManager
from nanovllm.scheduler.prompt_queue import PromptQueue
from nanovllm.scheduler.scheduler import Scheduler
from nanovllm.scheduler.sequence import Sequence
from nanovllm.scheduler.snapshots import Snapshot
from nanovllm.scheduler.stateful import StatefulBlockManager
from nanovllm.scheduler.tier import HostSlots
from nanovllm.scheduler.tiered import TieredScheduling
from nanovllm.scheduler.transfers import HOST
from nanovllm.scheduler.windowed import WindowBlock, WindowedBlockManager


def check_scheduler(scheduler: Scheduler) -> None:
    """Verify every invariant of the scheduler, and of its pool.

    Raises:
        AssertionError: a table row, a block or a sequence is lost or owned twice, or a count is
            wrong.
    """
    check_blocks(scheduler.block_manager, scheduler.running)
    if isinstance(scheduler, TieredScheduling):
        check_tiers(scheduler)
    owned = [seq.table_idx for seq in scheduler.running if seq.table_idx is not None]
    assert len(owned) == len(scheduler.running), "a running sequence has no table row"
    table_indices = sorted(owned + scheduler._free_table_indices)
    assert table_indices == list(range(len(table_indices))), "a table row is lost or owned twice"
    assert scheduler.running == sorted(scheduler.running, key=lambda s: s.order)
    queued = sequences_of(scheduler._prompts)
    assert {*queued} == {seq for seq in scheduler._sequences.values() if seq.is_queued}
    if isinstance(scheduler, TieredScheduling):
        queued += [seq for seq in scheduler._parked if not seq.is_finished]
    queued += getattr(scheduler, "_room", ())  # of a scheduler with adapters
    waiting = [seq for seq in queued if seq.table_idx is None]
    ids = [seq.seq_id for seq in scheduler.running + waiting]
    assert sorted(ids) == sorted(scheduler._sequences), "a sequence is lost or queued twice"
    assert all(not seq.block_table for seq in waiting)
    for seq in scheduler.running:
        assert 0 <= seq.num_computed_tokens <= seq.num_tokens <= scheduler.max_model_len
        assert len(seq.block_table) >= scheduler.block_manager.blocks_for(seq.num_computed_tokens)
        assert 0 <= seq.num_pending_tokens <= seq.num_in_flight_steps
        if isinstance(scheduler.block_manager, WindowedBlockManager):
            check_window_tables(scheduler.block_manager, seq)


def sequences_of(queue: PromptQueue) -> list[Sequence]:
    """Return all sequences of a queue, in no particular order."""
    users = chain.from_iterable(level._users.values() for level in queue._levels.values())
    return list(chain.from_iterable(user.sequences for user in users))


def check_tiers(scheduler: TieredScheduling) -> None:
    """Verify every invariant of loads, of host slots, and of what moves next.

    Raises:
        AssertionError: a slot, a pin or a loading sequence is lost, or an unwritten page is kept.
    """
    manager, traffic = scheduler.block_manager, scheduler.traffic
    cached = {block.uid: block.key[1] for block in manager.blocks if block.uid and block.key}
    assert manager._digests == cached
    assert manager._kept <= cached.keys()
    assert manager._admitted is None
    assert not manager._is_evicting
    assert {x.load_id: x for x in scheduler._loading.values()} == scheduler._loads
    assert len({x.load_id for x in scheduler._loading.values()}) == len(scheduler._loading)
    assert bool(scheduler._loads) or not (scheduler._loading_keys or scheduler._parked)
    loaded: list[int] = []
    for seq, plan in scheduler._loading.items():
        assert plan.seq is seq
        assert seq in scheduler.running
        assert not seq.is_queued
        assert seq.num_in_flight_steps == 0
        assert seq.num_computed_tokens == plan.num_blocks * manager.block_size
        loaded += [page for part in plan.parts for page in part.pages]
    assert len({*loaded}) == len(loaded), "two loads fill the same page"
    for page in loaded:
        assert manager.blocks[page].ref_count == 1, "a page is loaded and has no owner"
        assert manager.blocks[page].uid is None, "a page is hit before it is loaded"
    for key, part in traffic._unsent_parts.items():
        assert all(traffic._unsent_keys[page] == key for page in part.pages)
    assert sum(len(p.pages) for p in traffic._unsent_parts.values()) == len(traffic._unsent_keys)
    if traffic.host is not None:
        check_host_slots(traffic.host, scheduler)


def check_host_slots(host: HostSlots, scheduler: TieredScheduling) -> None:
    """Verify that each slot has one use, and that the loads in flight pin what they read.

    Raises:
        AssertionError: a slot is leaked, or a pin is.
    """
    pins: Counter[int] = Counter()
    for plan in scheduler._loads.values():
        pins.update(part.slots[0] for part in plan.parts if part.tier == HOST)
    assert {slot: entry.num_pins for slot, entry in host._pinned.items()} == pins
    entries = {*host._entries.values(), *host._pinned.values()}
    slots = [slot for entry in entries for slot in entry.slots] + host._free
    assert sorted(slots) == list(range(host.num_slots)), "a slot is lost or has two uses"
    unpinned = {key for key, entry in host._entries.items() if entry.num_pins == 0}
    assert host._unpinned.keys() == unpinned


def check_window_tables(manager: WindowedBlockManager, seq: Sequence) -> None:
    """Verify that a running sequence holds the window blocks that its next token reads.

    Raises:
        AssertionError: one is missing, or, without steps in flight, one is held for nothing.
    """
    for table, group in zip(manager._tables[seq], manager.windows, strict=True):
        assert table.end >= manager.blocks_for(seq.num_computed_tokens)
        position = seq.num_computed_tokens - seq.num_draft_tokens  # or a later one
        first = max(0, position + 1 - group.window) // manager.block_size
        assert table.start <= first
        assert table.start == first or seq.num_in_flight_steps, "a block left the window, and stays"
        assert table.num_sent <= table.end


def check_blocks(manager: BlockManager, sequences: Iterable[Sequence]) -> None:
    """Verify every invariant of the pool.

    Args:
        sequences: all sequences that own blocks.

    Raises:
        AssertionError: a block is leaked, has a wrong `ref_count`, or is wrongly cached.
    """
    owners: Counter[int] = Counter()
    for seq in sequences:
        assert len(set(seq.block_table)) == len(seq.block_table), "a table holds a block twice"
        assert seq.num_published_blocks <= len(seq.block_table)
        parent_uid: int | str | None = seq.root_uid
        for block in map(manager.blocks.__getitem__, seq.block_table):
            if block.key is not None and parent_uid is not None:
                assert block.key[0] == parent_uid, "a table holds a block of another prefix"
            parent_uid = block.uid
        owners.update(seq.block_table)
    if isinstance(manager, WindowedBlockManager):
        owners.update(check_window_blocks(manager, sequences))
    if isinstance(manager, StatefulBlockManager):
        owners.update(check_states(manager, sequences))
    for block_id, block in enumerate(manager.blocks):
        assert block.ref_count == owners[block_id], f"block {block_id}: wrong ref_count"
        assert (block.ref_count == 0) == (block_id in manager._free), f"block {block_id}: leaked"
        assert block.ref_count <= 1 or block.uid is not None, f"block {block_id}: not cached"
        assert (block.uid is None) == (block.key is None)
        if block.key is not None:
            assert manager._cached[block.key] == block_id
            assert len(block.tokens) == manager.block_size * array("I").itemsize
    assert all(manager.blocks[b].key == key for key, b in manager._cached.items())


def check_window_blocks(manager: WindowedBlockManager, sequences: Iterable[Sequence]) -> set[int]:
    """Verify every invariant of the window blocks; return the pages of those that are held.

    Raises:
        AssertionError: a window block has a wrong `ref_count`, or is wrongly cached.
    """
    assert manager._tables.keys() == {seq for seq in sequences if seq.table_idx is not None}
    owners: Counter[WindowBlock] = Counter()
    for tables in manager._tables.values():
        assert len({table.end for table in tables}) <= 1
        for table, group in zip(tables, manager.windows, strict=True):
            owners.update(table.blocks)
            assert all(len(block.pages) == group.pages for block in table.blocks)
    pages = [page for block in owners for page in block.pages]
    assert len(set(pages)) == len(pages), "two blocks have the same page"
    uids = {block.uid for block in manager.blocks}
    for block in {*owners, *manager._cached_windows.values()}:
        assert block.ref_count == owners[block]
        assert block.ref_count <= 1 or block.key is not None, "a shared block is not cached"
        for page in block.pages:
            assert (page in manager._free) == (block.ref_count == 0)
            assert manager.blocks[page].uid is None, "a page has two uses"
            assert manager._cached_pages.get(page) is (None if block.key is None else block)
        if block.key is not None:
            assert manager._cached_windows[block.key] is block
            assert block.key[1] in uids, "a window block is cached without its block"
    assert all(manager._cached_windows[b.key] is b for b in manager._cached_pages.values())
    is_cached = [
        manager.blocks[p].uid is not None or p in manager._cached_pages for p in manager._free
    ]
    assert is_cached == sorted(is_cached), "a cached page is reused before one that is not"
    return {*pages}


def check_states(manager: StatefulBlockManager, sequences: Iterable[Sequence]) -> list[int]:
    """Verify every invariant of states and snapshots; return the pages that these hold.

    Raises:
        AssertionError: a page has two uses or none, or a snapshot is held or cached for nothing.
    """
    assert manager._states.keys() == {seq for seq in sequences if seq.table_idx is not None}
    states = list(manager._states.values())
    waiting = [snapshot for state in states for snapshot in state.unpublished]
    begun = [state.begun for state in states if state.begun is not None]
    rolling = [state.rolling for state in states if state.rolling is not None]
    for state in states:
        assert len(state.pages) == manager.state_pages
        assert state.begun is None or state in manager._begun, "a snapshot is never copied"
        positions = [snapshot.position for snapshot in state.unpublished]
        assert positions == sorted({*positions})
    snapshots = {*manager._snapshots.values(), *waiting}
    copied = {s for s in snapshots if s.pages and not s.is_dropped}
    assert {*manager._snapshot_pages.values()} == copied
    assert sum(len(s.pages) for s in copied) == len(manager._snapshot_pages)
    held = {s for s in (*waiting, *rolling) if s in copied}
    assert manager._held.keys() == held, "no sequence needs a snapshot that is held"
    assert manager.enable_prefix_caching or not snapshots
    uids = {block.uid for block in manager.blocks}
    for snapshot in snapshots:
        check_snapshot(manager, snapshot, is_held=snapshot in held)
        assert snapshot.pages or snapshot.is_dropped or snapshot in begun, "it is never copied"
        assert snapshot.uid is None or snapshot.is_dropped or snapshot.uid in uids, "it outlives"
    is_cached = [
        manager.blocks[p].uid is not None or p in manager._snapshot_pages for p in manager._free
    ]
    assert is_cached == sorted(is_cached), "a cached page is reused before one that is not"
    pages = [page for state in states for page in state.pages]
    return pages + [page for snapshot in held for page in snapshot.pages]


def check_snapshot(manager: StatefulBlockManager, snapshot: Snapshot, *, is_held: bool) -> None:
    """Verify the invariants of one snapshot.

    Raises:
        AssertionError: its pages are wrong, or it is not what its `uid` leads to.
    """
    if snapshot.is_dropped:
        return
    assert len(snapshot.pages) in (0, manager.state_pages)
    assert snapshot.position % manager.block_size == 0
    assert snapshot.uid is None or manager._snapshots[snapshot.uid] is snapshot
    for page in snapshot.pages:
        assert manager._snapshot_pages[page] is snapshot
        assert manager.blocks[page].uid is None, "a page has two uses"
        assert (page in manager._free) == (not is_held)
