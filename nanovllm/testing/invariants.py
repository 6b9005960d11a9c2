"""What must hold between two calls of the scheduler or of its block manager. Imports no torch."""

from array import array
from collections import Counter
from collections.abc import Iterable
from itertools import chain

from nanovllm.core.sequence import Sequence
from nanovllm.kv.block_manager import BlockManager
from nanovllm.kv.groups.state import Snapshot, StateGroup
from nanovllm.kv.groups.window import WindowBlock, WindowGroup
from nanovllm.kv.trie import Node
from nanovllm.scheduler.fair_policy import FairPolicy
from nanovllm.scheduler.scheduler import Scheduler


def check_scheduler(scheduler: Scheduler) -> None:
    """Verify every invariant of the scheduler, and of its pool.

    Raises:
        AssertionError: a table row, a block or a sequence is lost or owned twice, or a count is
            wrong.
    """
    check_blocks(scheduler.block_manager, scheduler.running)
    owned = [seq.table_idx for seq in scheduler.running if seq.table_idx is not None]
    assert len(owned) == len(scheduler.running), "a running sequence has no table row"
    table_indices = sorted(owned + scheduler._free_table_indices)
    assert table_indices == list(range(len(table_indices))), "a table row is lost or owned twice"
    in_order = sorted(scheduler.running, key=scheduler.policy.order)
    assert scheduler.running == in_order, "running sequences are not in the policy's order"
    queued = [seq for seq in scheduler._sequences.values() if seq.is_queued]
    if isinstance(scheduler.policy, FairPolicy):
        assert {*sequences_of(scheduler.policy)} == {*queued}
    for hook in scheduler.hooks:
        queued += getattr(hook, "_room", ())  # of adapters
        queued += [seq for seq in getattr(hook, "_parked", ()) if not seq.is_finished]  # of loads
    waiting = [seq for seq in queued if seq.table_idx is None]
    ids = [seq.seq_id for seq in scheduler.running + waiting]
    assert sorted(ids) == sorted(scheduler._sequences), "a sequence is lost or queued twice"
    assert all(not seq.kv.block_table for seq in waiting)
    for seq in scheduler.running:
        assert 0 <= seq.num_computed_tokens <= seq.num_tokens <= scheduler.max_model_len
        assert len(seq.kv.block_table) >= scheduler.block_manager.blocks_for(
            seq.num_computed_tokens
        )
        assert 0 <= seq.num_pending_tokens <= seq.num_in_flight_steps
        assert not seq.is_held or any(seq in getattr(g, "_loading", ()) for g in scheduler.hooks)
        for group in scheduler.block_manager.groups:
            if isinstance(group, WindowGroup):
                check_window_table(group, seq)


def sequences_of(queue: FairPolicy) -> list[Sequence]:
    """Return all sequences of a queue, in no particular order."""
    users = chain.from_iterable(level._users.values() for level in queue._levels.values())
    return list(chain.from_iterable(user.sequences for user in users))


def check_window_table(group: WindowGroup, seq: Sequence) -> None:
    """Verify that a running sequence holds the window blocks that its next token reads.

    Raises:
        AssertionError: one is missing, or, without steps in flight, one is held for nothing.
    """
    table = group._tables[seq]
    assert table.end >= -(-seq.num_computed_tokens // group.block_size)
    position = seq.num_computed_tokens - seq.num_draft_tokens  # or a later one
    first = max(0, position + 1 - group.window.window) // group.block_size
    assert table.start <= first
    assert table.start == first or seq.num_in_flight_steps, "a block left the window, and stays"
    assert table.num_sent <= table.end <= len(seq.kv.block_table), "blocks are held for no token"


def check_blocks(manager: BlockManager, sequences: Iterable[Sequence]) -> None:
    """Verify every invariant of the pool and of all groups.

    Args:
        sequences: all sequences that own blocks.

    Raises:
        AssertionError: a block is leaked, has a wrong `ref_count`, or is wrongly cached.
    """
    owners = check_full_blocks(manager, sequences)
    for group in manager.groups:
        if isinstance(group, WindowGroup):
            owners.update(check_window_blocks(group, sequences))
        if isinstance(group, StateGroup):
            owners.update(check_states(group, sequences))
    free = list(manager.pool.free)
    assert len(free) == len({*free}) == manager.pool.num_free
    for page, block in enumerate(manager.blocks):
        assert block.ref_count == owners[page], f"page {page}: wrong ref_count"
        assert (block.ref_count == 0) == (page in manager.pool.free), f"page {page}: leaked"
        assert block.ref_count <= 1 or block.entry is not None, f"page {page}: not cached"
        if isinstance(block.entry, Node):
            assert block.entry.page == page
        elif isinstance(block.entry, WindowBlock | Snapshot):
            assert page in block.entry.pages
    is_cached = [manager.blocks[page].entry is not None for page in free]
    assert is_cached == sorted(is_cached), "a cached page is reused before one that is not"


def check_full_blocks(manager: BlockManager, sequences: Iterable[Sequence]) -> Counter[int]:
    """Verify every invariant of block tables and of the trie; return the owners of each page.

    Raises:
        AssertionError: a table holds a wrong block, or a node is not what its key leads to.
    """
    owners: Counter[int] = Counter()
    for seq in sequences:
        assert len(set(seq.kv.block_table)) == len(seq.kv.block_table), (
            "a table holds a block twice"
        )
        assert seq.kv.num_published_blocks <= len(seq.kv.block_table)
        parent_uid: int | str | None = seq.root_uid
        for block in map(manager.blocks.__getitem__, seq.kv.block_table):
            assert block.entry is None or isinstance(block.entry, Node), "a page has two uses"
            if block.entry is not None and parent_uid is not None:
                assert block.entry.key[0] == parent_uid, "a table holds a block of another prefix"
            parent_uid = None if block.entry is None else block.entry.uid
        owners.update(seq.kv.block_table)
    cached = {block.entry for block in manager.blocks if isinstance(block.entry, Node)}
    assert cached == {*manager.trie.nodes.values()}
    assert len(cached) == len({node.uid for node in cached})
    for key, node in manager.trie.nodes.items():
        assert node.key == key
        assert manager.blocks[node.page].entry is node
        of_inputs = len(node.tokens) - manager.block_size * array("I").itemsize
        assert of_inputs >= 0
        assert of_inputs % 56 == 0
    return owners


def check_window_blocks(group: WindowGroup, sequences: Iterable[Sequence]) -> Counter[int]:
    """Verify every invariant of the window blocks; return the owners of each page.

    Raises:
        AssertionError: a window block has wrong pages, or is wrongly cached.
    """
    assert group._tables.keys() == {seq for seq in sequences if seq.table_idx is not None}
    tables = group._tables.values()
    held = {block for table in tables for block in table.blocks}
    assert not any(table.unfilled for table in tables)
    known = {*held, *group._cached.values()}
    pages = [page for block in known for page in block.pages]
    assert len(set(pages)) == len(pages), "two blocks have the same page"
    blocks = group.pool.blocks
    for block in known:
        assert len(block.pages) == group.num_tables
        entry = None if block.node is None else block
        assert all(blocks[page].entry is entry for page in block.pages)
        assert len({blocks[page].ref_count for page in block.pages}) == 1
    for uid, block in group._cached.items():
        assert block.node is not None
        assert block.node.uid == uid
        assert group.trie.nodes.get(block.node.key) is block.node, "a window block outlives"
    entries = {b.entry for b in blocks if isinstance(b.entry, WindowBlock)}
    assert {entry for entry in entries if entry.group is group} == {*group._cached.values()}
    return Counter(page for t in tables for block in t.blocks for page in block.pages)


def check_states(group: StateGroup, sequences: Iterable[Sequence]) -> list[int]:
    """Verify every invariant of states and snapshots; return the pages that these hold.

    Raises:
        AssertionError: a page has two uses or none, or a snapshot is held or cached for nothing.
    """
    assert group._states.keys() == {seq for seq in sequences if seq.table_idx is not None}
    states = list(group._states.values())
    waiting = [snapshot for state in states for snapshot in state.unpublished]
    begun = [state.begun for state in states if state.begun is not None]
    rolling = [state.rolling for state in states if state.rolling is not None]
    for state in states:
        assert len(state.pages) == group.num_pages
        assert all(group.pool.blocks[page].entry is None for page in state.pages)
        assert state.hit is None, "a snapshot stays pinned"
        assert state.begun is None or state in group._begun, "a snapshot is never copied"
        positions = [snapshot.position for snapshot in state.unpublished]
        assert positions == sorted({*positions})
    snapshots = {*group._snapshots.values(), *waiting}
    copied = {s for s in snapshots if s.pages and not s.is_dropped}
    entries = {b.entry for b in group.pool.blocks if isinstance(b.entry, Snapshot)}
    assert entries == copied
    held = {s for s in (*waiting, *rolling) if s in copied}
    assert group._held.keys() == held, "no sequence needs a snapshot that is held"
    assert group.trie.is_enabled or not snapshots
    for snapshot in snapshots:
        check_snapshot(group, snapshot, is_held=snapshot in held)
        assert snapshot.pages or snapshot.is_dropped or snapshot in begun, "it is never copied"
    pages = [page for state in states for page in state.pages]
    return pages + [page for snapshot in held for page in snapshot.pages]


def check_snapshot(group: StateGroup, snapshot: Snapshot, *, is_held: bool) -> None:
    """Verify the invariants of one snapshot.

    Raises:
        AssertionError: its pages are wrong, or it is not what its node leads to.
    """
    if snapshot.is_dropped:
        return
    assert len(snapshot.pages) in (0, group.num_pages)
    assert snapshot.position % group.block_size == 0
    node = snapshot.node
    if node is not None:
        assert group._snapshots[node.uid] is snapshot
        assert group.trie.nodes.get(node.key) is node, "a snapshot outlives its block"
    for page in snapshot.pages:
        assert group.pool.blocks[page].entry is snapshot, "a page has two uses"
        assert (page in group.pool.free) == (not is_held)
