"""Layers with a state: a few numbers that stand for all tokens before a sequence's next one.

They lie in pages of the pool. Copies of them, snapshots, are what the prefix cache has of them.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence as Seq

from nanovllm.core.messages import NewBlocks, PageCopy
from nanovllm.core.sequence import Sequence
from nanovllm.kv.groups.group import KVCacheGroup, StepPages
from nanovllm.kv.pool import BlockPool
from nanovllm.kv.trie import Hit, Node, PrefixTrie

ROOM_TO_GROW = 2
"""Pages that are left for each running sequence when another one is admitted, if it can grow by as
many. One that is preempted computes most of its tokens again, because it loses its state."""
SNAPSHOT_INTERVAL = 1024
"""Each time that so many tokens more of a long prompt are computed, a snapshot is taken."""


@dataclasses.dataclass(slots=True, eq=False)
class Snapshot:
    """A copy of a sequence's state, as it is after the sequence's first `position` tokens.

    It is cached if and only if it has a `node`: that of the cached block that ends at `position`.
    It has no pages until its copy is scheduled. A dropped one is not used any more.
    """

    group: "StateGroup"
    position: int
    is_rolling: bool
    is_of_prompt: bool
    is_dropped: bool = False
    pages: list[int] = dataclasses.field(default_factory=list)
    node: Node | None = None
    copy: PageCopy | None = None  # which writes it; None for a state that became a snapshot

    def evict(self) -> None:
        """Leave the prefix cache, because one of the pages is reused."""
        self.group.drop(self, evicted=True)


@dataclasses.dataclass(slots=True, eq=False)
class State:
    """What a running sequence has of the group."""

    pages: list[int]
    start: int  # the position of the snapshot that it began with; or 0
    branch: int  # the position where the cached blocks end that the sequence began with; or 0
    last: int  # the last block boundary before the last token that was known at the admission
    hit: Snapshot | None = None  # to copy, as long as the state has no pages
    begun: Snapshot | None = None  # of the state after the last step; the next step copies it
    unpublished: list[Snapshot] = dataclasses.field(default_factory=list)  # by position
    rolling: Snapshot | None = None


class StateGroup(KVCacheGroup):
    """Holds the state of each running sequence, and takes snapshots of it for prefix hits.

    Invariants, verified by nanovllm/testing/invariants.py:
    - A running sequence owns `num_pages` pages, all of them from its admission on.
    - They hold the state after the certain tokens of its last launched row: all but the drafts.
    - A cached snapshot's node is in the trie. They leave the cache together.
    - The pages of a snapshot are all held, by the snapshot alone, or all free.
    - A running sequence has one rolling snapshot at most. The pages of other cached snapshots are
      free.

    **Where.** A prompt's state is copied at block boundaries: the last one before its last token,
    each `snapshot_interval` tokens, and where the prompt leaves what is cached. Rows end there, see
    `row_length`. Later each row whose certain tokens end at a boundary gives a rolling snapshot.
    It replaces the one before. When the sequence ends it is a snapshot like others.

    **When.** A step changes states in place. So the state after step k is copied by step k + 1,
    before its rows; `fill_step` notes at the launch of step k what `begin_step` schedules then.
    Between the two calls no page is taken, so the state is there even if its sequence has ended.
    Its pages then become the snapshot, and nothing is copied. A snapshot is cached when its block
    is: after the result of step k. Before that call of `publish` nobody can hit it. If steps
    overlap this is later than its copy, else it is earlier, and `begin_step` is called before the
    next admission.

    **Order.** The copies of a step are in the order in which their pages were taken, and run before
    the step zeroes pages and computes rows. So what a copy reads was written before, and a page
    that is taken again is written by its next owner later. No page is held until a copy has run.

    **Room.** A snapshot takes free pages only. Those of held snapshots count as free: they are
    dropped as soon as a sequence needs pages, the oldest first, so no sequence waits for them. If
    pages are short, a hit takes the pages of its snapshot instead of a copy. A rolling one leaves
    free an eighth of the pool, and a page for each running sequence. So a full pool has none. An
    admission leaves room for the next blocks of the others: ROOM_TO_GROW.

    **Failures.** A failed step may not have run its copies: `undo_copies` drops what they should
    have written. What its rows gave is not published, and is dropped with their sequences.

    **Lower tiers.** A step makes its copies after its offers to host memory, and one that fails may
    make none. So a snapshot whose copy the next step makes is not offered when it is evicted. A
    prompt's snapshot is kept once its copy is certain: see `end_copies`.

    A state has `num_pages`. The `snapshot_interval` is in tokens, and rounded to whole blocks.
    """

    suffix = b"s"
    grows = False

    def __init__(self, num_pages: int, *, snapshot_interval: int = SNAPSHOT_INTERVAL) -> None:
        self.num_pages = num_pages
        self.num_tables = num_pages
        self._snapshot_interval = snapshot_interval
        self._states: dict[Sequence, State] = {}
        self._begun: list[State] = []  # of the last step's rows, those with `begun`
        self._copies: list[PageCopy] = []  # for the next step
        self._snapshots: dict[int, Snapshot] = {}  # the cached ones, by uid of the node
        self._held: OrderedDict[Snapshot, None] = OrderedDict()  # whose pages are not free

    def attach(self, pool: BlockPool, trie: PrefixTrie, first_table: int) -> None:
        super().attach(pool, trie, first_table)
        self._interval = max(1, self._snapshot_interval // self.block_size) * self.block_size

    def needed(self, num_blocks: int) -> range:
        """Return the block at whose end the snapshot is."""
        return range(max(0, num_blocks - 1), num_blocks)

    def has(self, node: Node) -> bool:
        snapshot = self._snapshots.get(node.uid)
        return snapshot is not None and bool(snapshot.pages)

    def num_missing(self, seq: Sequence, num_tokens: int, hit: Hit | None = None) -> int:
        return 0 if hit is None else self.num_pages + self._room_to_grow

    def begin(self, seq: Sequence, hit: Hit, num_missing: int) -> int:
        """Admit a sequence. If pages are short it takes those of the snapshot that it hits."""
        room = self._room_to_grow
        num_missing -= room
        state = self._states[seq] = self._new_state(seq, hit)
        snapshot = None
        last = hit.num_blocks - 1
        if last >= 0 and (last, self.suffix) not in hit.loaded:
            snapshot = self._snapshots[hit.matched[last].uid]
        if snapshot is None:
            return room
        num_free = self.pool.num_free
        if snapshot in self._held:
            must_give = num_missing > num_free
        else:
            must_give = num_missing + self.num_pages > num_free
            self.pool.hold(snapshot.pages)
        if not must_give:
            state.hit = snapshot
            return room
        state.pages = snapshot.pages
        self._forget(snapshot, evicted=True)
        self.pool.rewrite(state.pages)
        return room + self.num_pages

    def extend(self, seq: Sequence, num_tokens: int) -> None:
        state = self._states[seq]
        if state.pages:
            return
        state.pages = self.take_pages()
        snapshot = state.hit
        state.hit = None
        if snapshot is not None:
            self._copies.append(PageCopy(snapshot.pages, state.pages))
            if snapshot not in self._held:
                self.pool.release(snapshot.pages)

    def make_room(self, seq: Sequence, num_pages: int) -> None:
        """Drop held snapshots until `num_pages` pages are free, or none if these do not suffice."""
        if num_pages <= self.pool.num_free + self.num_spare:
            while num_pages > self.pool.num_free:
                self.drop(next(iter(self._held)), evicted=True)

    @property
    def num_spare(self) -> int:
        return len(self._held) * self.num_pages

    def publish(self, seq: Sequence, first: int, nodes: Seq[Node], num_written: int) -> None:
        """Cache the snapshots at the ends of blocks that are published."""
        state = self._states[seq]
        while state.unpublished and state.unpublished[0].position <= num_written:
            snapshot = state.unpublished.pop(0)
            index = snapshot.position // self.block_size - 1 - first
            node = nodes[index] if 0 <= index < len(nodes) else None
            if snapshot.is_dropped or node is None or node.uid in self._snapshots:
                self.drop(snapshot, evicted=False)
                continue
            snapshot.node = node
            self._snapshots[node.uid] = snapshot
            if snapshot.pages:
                self._keep(state, snapshot)

    def free(self, seq: Sequence, distrusted: Seq[Node] | None) -> None:
        state = self._states.pop(seq, None)
        if state is None:
            return
        for snapshot in state.unpublished:
            self.drop(snapshot, evicted=False)
        begun = state.begun
        state.begun = None
        if begun is None or begun.is_dropped:
            self.pool.release(reversed(state.pages))
        else:  # the sequence does not need its state any more
            self._hold(begun, state.pages)
            self._keep(state, begun)
        if state.rolling is not None and not state.rolling.is_dropped:
            self._let_go(state.rolling)
        for node in distrusted or ():
            if node.uid in self._snapshots:
                self.drop(self._snapshots[node.uid], evicted=False)
        if begun is not None:
            self._offer(begun)

    def forget(self, node: Node, *, evicted: bool) -> None:
        snapshot = self._snapshots.get(node.uid)
        if snapshot is not None:
            self.drop(snapshot, evicted=evicted)

    def drop(self, snapshot: Snapshot, *, evicted: bool) -> None:
        """Forget a snapshot, and free its pages. See `KVCacheGroup.forget`."""
        if snapshot.is_dropped:
            return
        is_held = snapshot in self._held
        self._forget(snapshot, evicted=evicted)
        for page in reversed(snapshot.pages):
            self.pool.clear(page)
        if is_held:
            self.pool.release(reversed(snapshot.pages))

    def pages_of(self, seq: Sequence, index: int) -> list[int]:
        return self._states[seq].pages

    def begin_step(self) -> None:
        """Schedule the copies of the snapshots that the last step began."""
        for state in self._begun:
            begun = state.begun
            state.begun = None
            if begun is None:
                continue
            reserve = 0
            if begun.is_rolling:
                reserve = max(len(self._states), len(self.pool.blocks) // 8)
            is_wanted = not begun.is_dropped and self._has_room(reserve)
            pages = self.take_pages() if is_wanted else []
            if begun.is_dropped or not pages:  # perhaps its block was one of these pages
                self.drop(begun, evicted=False)
                self.pool.release(reversed(pages))
                continue
            self._hold(begun, pages)
            begun.copy = PageCopy(state.pages, pages)
            self._copies.append(begun.copy)
            if begun.node is not None:
                self._keep(state, begun)
        self._begun.clear()

    def row_length(self, seq: Sequence, most: int) -> int:
        """Return how many of the next `most` tokens a row computes: up to the next snapshot."""
        state = self._states[seq]
        position = seq.num_computed_tokens
        if position < state.last and self._has_room(0):
            stops = state.branch, state.last, (position // self._interval + 1) * self._interval
            most = min(most, *(stop - position for stop in stops if stop > position))
        return most

    def fill_step(self, step: StepPages) -> None:
        """Add the pages of new states and the copies, and begin the snapshots of the rows' ends."""
        start = self.first_table * step.width
        for new in step.admissions:
            state = self._states[step.sequences[new.seq_id]]
            step.new_blocks.append(NewBlocks(new.table_idx, start, state.pages))
            if not state.start:
                step.blocks_to_zero += state.pages
        if self.trie.is_enabled:
            for row in step.rows:
                if row.sample_position % self.block_size == 0:
                    self._begin_snapshot(step.sequences[row.seq_id], row.sample_position)
        step.copies += self._copies
        self._copies = []

    def end_copies(self, copies: Seq[PageCopy]) -> None:
        for copy in copies:
            entry = self.pool.blocks[copy.targets[0]].entry
            if isinstance(entry, Snapshot) and entry.copy is copy:
                self._offer(entry)

    def undo_copies(self, copies: Seq[PageCopy]) -> None:
        for copy in copies:
            entry = self.pool.blocks[copy.targets[0]].entry
            if isinstance(entry, Snapshot):
                self.drop(entry, evicted=False)

    @property
    def _room_to_grow(self) -> int:
        """Pages that an admission leaves for the others, free or in held snapshots."""
        room = 0
        for seq in self._states:
            num_blocks = -(-seq.max_num_tokens // self.block_size)
            room += max(0, min(ROOM_TO_GROW, num_blocks - len(seq.kv.block_table)))
        return room

    def _new_state(self, seq: Sequence, hit: Hit) -> State:
        """Return the state, still without pages, of a sequence that begins after a hit."""
        position = hit.num_blocks * self.block_size
        last = (len(seq.token_ids) - 1) // self.block_size * self.block_size
        matched = len(hit.matched) * self.block_size
        # A branch that is near is not worth a snapshot.
        branch = matched if matched - position > self._interval // 8 else 0
        return State([], position, branch, last)

    def _begin_snapshot(self, seq: Sequence, position: int) -> None:
        """Note the snapshot of the state after a launched row, whose certain tokens end at the
        block boundary `position`, if one is to be taken.
        """
        state = self._states[seq]
        is_rolling = position > state.last
        if is_rolling or position in (state.branch, state.last) or position % self._interval == 0:
            state.begun = Snapshot(self, position, is_rolling, position <= seq.num_prompt_tokens)
            state.unpublished.append(state.begun)
            self._begun.append(state)

    def _has_room(self, reserve: int) -> bool:
        """Return whether a snapshot leaves `reserve` pages free."""
        return self.trie.is_enabled and self.pool.num_free >= self.num_pages + reserve

    def _hold(self, snapshot: Snapshot, pages: list[int]) -> None:
        """Give a snapshot pages, which are not free."""
        snapshot.pages = pages
        for page in pages:
            self.pool.blocks[page].entry = snapshot
        self._held[snapshot] = None

    def _let_go(self, snapshot: Snapshot) -> None:
        """Free the pages of a snapshot, which stays cached until they are reused."""
        del self._held[snapshot]
        self.pool.release(snapshot.pages)

    def _keep(self, state: State, snapshot: Snapshot) -> None:
        """Keep a held and cached snapshot: the rolling one for its sequence, another for all."""
        if not snapshot.is_rolling:
            self._let_go(snapshot)
            return
        if state.rolling is not None:
            self.drop(state.rolling, evicted=False)
        state.rolling = snapshot

    def _forget(self, snapshot: Snapshot, *, evicted: bool) -> None:
        """Remove a snapshot from the cache. The caller clears its pages."""
        node = snapshot.node
        if evicted and node is not None and snapshot.pages:
            is_copied = all(copy.targets != snapshot.pages for copy in self._copies)
            if is_copied:
                self.pool.listener.evicted(node, self.suffix, snapshot.pages)
        snapshot.is_dropped = True
        self._held.pop(snapshot, None)
        if node is not None:
            del self._snapshots[node.uid]

    def _offer(self, snapshot: Snapshot) -> None:
        """Tell listeners of a prompt's snapshot: it is cached, and its pages hold it."""
        node = snapshot.node
        if node is not None and snapshot.is_of_prompt and not snapshot.is_dropped:
            self.pool.listener.written(node, self.suffix, snapshot.pages)
