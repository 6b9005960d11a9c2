"""The block manager and the scheduler of a model whose layers have a state.

Such a layer keeps, for each running sequence, a few numbers that stand for all tokens before its
next one. They lie in pages of the KV pool. Knows no tensors.
"""

import dataclasses
import math
from bisect import insort
from collections.abc import Sequence as Seq
from typing import Any

from nanovllm.scheduler.cached_chain import cached_chain
from nanovllm.scheduler.messages import Admission, NewBlocks, PageCopy, Row, Schedule
from nanovllm.scheduler.prompt_queue import PromptQueue
from nanovllm.scheduler.scheduler import Scheduler
from nanovllm.scheduler.sequence import Sequence
from nanovllm.scheduler.snapshots import Snapshot, SnapshotCache

SNAPSHOT_INTERVAL = 1024
"""Each time that so many tokens more of a long prompt are computed, a snapshot is taken."""


@dataclasses.dataclass(slots=True, eq=False)
class State:
    """What a running sequence has beside its block table."""

    pages: list[int]
    start: int  # the position of the snapshot that it began with; or 0
    branch: int  # the position where the cached blocks end that the sequence began with; or 0
    last: int  # the last multiple of `unit` before the last token that was known at the admission
    begun: Snapshot | None = None  # of the state behind the last step; the next step copies it
    unpublished: list[Snapshot] = dataclasses.field(default_factory=list)  # by position
    rolling: Snapshot | None = None


class StatefulBlockManager(SnapshotCache):
    """Holds the state of each running sequence, and takes snapshots of it for prefix hits.

    Invariants, beside those of `SnapshotCache`, verified by tests/scheduler/invariants.py:
    - A running sequence owns `state_pages` pages, all of them from its admission on.
    - They hold the state behind the certain tokens of its last launched row: all but the drafts.
    - A running sequence has one rolling snapshot at most. The pages of other cached snapshots are
      free.

    **Where.** A prompt's state is copied at block boundaries: the last one before its last token,
    each `snapshot_interval` tokens, and where the prompt leaves what is cached. Rows end there, see
    `row_length`. Later each row whose certain tokens end at a boundary gives a rolling snapshot.
    It replaces the one before. When the sequence ends it is a snapshot like others.

    **When.** A step changes states in place. So the state behind step k is copied by step k + 1,
    before its rows; `begin` notes at the launch of step k what `save` schedules then. Between the
    two calls no page is taken, so the state is there even if its sequence has ended. Its pages then
    become the snapshot, and nothing is copied. A snapshot is cached when its block is: after the
    result of step k. Before that call of `publish` nobody can hit it. If steps overlap this is
    later than its copy, else it is earlier, and `save` is called before the next admission.

    **Order.** The copies of a step are in the order in which their pages were taken, and run before
    the step zeroes pages and computes rows. So what a copy reads was written by an earlier copy or
    an earlier step, and a page that is taken again is written by its next owner later. No page is
    held until a copy has run.

    **Room.** A snapshot takes free pages only. Those of held snapshots count as free: they are
    dropped as soon as a sequence needs pages, the oldest first, so no sequence waits for them. If
    pages are short, a hit takes the pages of its snapshot instead of a copy. A rolling one leaves
    free an eighth of the pool, and a page for each running sequence. So a full pool has none.

    **Cells.** If the device computes prompts in cells, counted from position 0, a prompt's rows end
    at multiples of `cell_tokens`, or with the prompt. Snapshots are taken at such multiples, so a
    hit begins a cell. So the form in which a token is computed does not depend on the steps.

    **Failures.** A failed step may not have run its copies: `forget` drops what they should have
    written. What its rows gave is not published, and is dropped with their sequences.

    Args:
        snapshot_interval: in tokens; rounded to whole blocks.
        cell_tokens: see `WorkerInfo`.
        options: those of `SnapshotCache`.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        snapshot_interval: int = SNAPSHOT_INTERVAL,
        cell_tokens: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(num_blocks, block_size, **options)
        self.cell_tokens = cell_tokens
        self.unit = math.lcm(block_size, cell_tokens)  # snapshots are taken at its multiples
        self._interval = max(1, snapshot_interval // self.unit) * self.unit
        self._states: dict[Sequence, State] = {}
        self._begun: list[State] = []  # of the last step's rows, those with `begun`
        self._copies: list[PageCopy] = []  # for the next step

    def match_prefix(self, seq: Sequence) -> list[int]:
        """Return the blocks of the longest cached prefix that a snapshot is cached for."""
        matched = super().match_prefix(seq)
        while matched and self._snapshot_behind(matched) is None:
            matched.pop()
        return matched

    def allocate_blocks(
        self, seq: Sequence, num_tokens: int, cached_blocks: Seq[int] = ()
    ) -> list[int] | None:
        """Extend a sequence's block table, and give it a state if it has none, all or nothing.

        Returns:
            The blocks appended; None, with nothing changed, if too few pages are free.
        """
        if seq in self._states:
            num_missing = self.blocks_for(num_tokens) - len(seq.block_table)
            if num_missing > len(self._free) and not self._make_room(num_missing):
                return None
            return super().allocate_blocks(seq, num_tokens)
        num_missing = self.state_pages + self.blocks_for(num_tokens) - len(cached_blocks)
        num_missing += sum(self.blocks[block_id].ref_count == 0 for block_id in cached_blocks)
        if num_missing > self.num_free_blocks:
            return None
        state = self._new_state(seq, self.hit_position(cached_blocks))
        hit = self._snapshot_behind(cached_blocks)
        if hit is not None and self._must_give_pages(hit, num_missing):
            state.pages = self._take_over(hit)
            num_missing -= self.state_pages
        self._make_room(num_missing)
        appended = super().allocate_blocks(seq, num_tokens, cached_blocks)
        assert appended is not None
        if not state.pages:
            state.pages = self._take_state_pages()
            if hit is not None:
                self._copies.append(PageCopy(hit.pages, state.pages))
        self._states[seq] = state
        return appended

    def publish(self, seq: Sequence, num_written: int) -> None:
        """Cache the full blocks of a sequence's first `num_written` tokens, and their snapshots."""
        state = self._states[seq]
        while state.unpublished and state.unpublished[0].position <= num_written:
            snapshot = state.unpublished.pop(0)
            super().publish(seq, snapshot.position)
            uid = seq.parent_uid
            if snapshot.is_dropped or not isinstance(uid, int) or uid in self._snapshots:
                self._drop(snapshot)
                continue
            snapshot.uid = uid
            self._snapshots[uid] = snapshot
            if snapshot.pages:
                self._keep(state, snapshot)
        super().publish(seq, num_written)

    def free(self, seq: Sequence, *, keep_cached: bool = True) -> None:
        chain = [] if keep_cached else list(cached_chain(self, seq, 0, seq.root_uid))
        super().free(seq, keep_cached=keep_cached)
        state = self._states.pop(seq)
        for snapshot in state.unpublished:
            self._drop(snapshot)
        begun, state.begun = state.begun, None
        if begun is None or begun.is_dropped:
            self._free_uncached(state.pages)
        else:  # the sequence needs its state no more
            self._hold(begun, state.pages)
            self._keep(state, begun)
        if state.rolling is not None and not state.rolling.is_dropped:
            self._let_go(state.rolling)
        for uid, _ in chain:
            if uid in self._snapshots:
                self._drop(self._snapshots[uid])

    def row_length(self, seq: Sequence, most: int) -> int:
        """Return how many of the next `most` tokens a row computes: up to the next snapshot, and to
        the end of its last cell, which may be up to cell_tokens - 1 more than `most`.
        """
        state, position = self._states[seq], seq.num_computed_tokens
        if position < state.last and self._has_room(0):
            stops = state.branch, state.last, (position // self._interval + 1) * self._interval
            most = min(most, *(stop - position for stop in stops if stop > position))
        left = seq.num_prompt_tokens - position
        if most >= left:
            return most
        return min(left, most + -(position + most) % self.cell_tokens)

    def begin(self, seq: Sequence, position: int) -> None:
        """Note the snapshot of the state behind a launched row, if there shall be one.

        Args:
            position: behind the row's certain tokens; a multiple of `unit`.
        """
        if not self.enable_prefix_caching:
            return
        state = self._states[seq]
        is_rolling = position > state.last
        if is_rolling or position in (state.branch, state.last) or position % self._interval == 0:
            state.begun = Snapshot(position, is_rolling)
            state.unpublished.append(state.begun)
            self._begun.append(state)

    def save(self) -> None:
        """Schedule the copies of the snapshots that the last step began. It is called once between
        two steps, before pages are taken.
        """
        for state in self._begun:
            begun, state.begun = state.begun, None
            if begun is None:
                continue
            reserve = max(len(self._states), len(self.blocks) // 8) if begun.is_rolling else 0
            is_wanted = not begun.is_dropped and self._has_room(reserve)
            pages = self._take_state_pages() if is_wanted else []
            if begun.is_dropped or not pages:  # perhaps its block was one of these pages
                self._drop(begun)
                self._free_uncached(pages)
                continue
            self._hold(begun, pages)
            self._copies.append(PageCopy(state.pages, pages))
            if begun.uid is not None:
                self._keep(state, begun)
        self._begun.clear()

    def state_of(self, seq: Sequence) -> State:
        """Return the state of a running sequence."""
        return self._states[seq]

    def take_copies(self) -> list[PageCopy]:
        """Return the copies of the next step, in order."""
        copies, self._copies = self._copies, []
        return copies

    def forget(self, copies: Seq[PageCopy]) -> None:
        """Drop the snapshots that `copies` should have written."""
        for copy in copies:
            snapshot = self._snapshot_pages.get(copy.targets[0])
            if snapshot is not None:
                self._drop(snapshot)

    def _new_state(self, seq: Sequence, position: int) -> State:
        """Return the state, still without pages, of a sequence that begins at `position`."""
        last = (len(seq.token_ids) - 1) // self.unit * self.unit
        matched = len(super().match_prefix(seq)) * self.block_size // self.unit * self.unit
        # A branch that is near is not worth a snapshot.
        branch = matched if matched - position > self._interval // 8 else 0
        return State([], position, branch, last)

    def _snapshot_behind(self, cached_blocks: Seq[int]) -> Snapshot | None:
        """Return the cached snapshot behind the last of `cached_blocks`, if it can be hit."""
        uid = self.blocks[cached_blocks[-1]].uid if cached_blocks else None
        snapshot = None if uid is None else self._snapshots.get(uid)
        return snapshot if snapshot is not None and snapshot.pages else None

    def _keep(self, state: State, snapshot: Snapshot) -> None:
        """Keep a held and cached snapshot: the rolling one for its sequence, another for all."""
        if not snapshot.is_rolling:
            self._let_go(snapshot)
            return
        if state.rolling is not None:
            self._drop(state.rolling)
        state.rolling = snapshot


class StepQueue(PromptQueue):
    """A queue that a prompt leaves for the rest of a step in which it has got a row.

    So after a row that ends at a snapshot the next prompts get theirs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.paused: list[Sequence] = []

    def advance(self, seq: Sequence, num_left: int) -> None:
        super().advance(seq, num_left)
        if num_left > 0:
            self.remove(seq)
            self.paused.append(seq)


class StatefulScheduler(Scheduler):
    """A scheduler whose steps also carry the states' pages, and the copies of snapshots."""

    block_manager: StatefulBlockManager

    def __init__(self, block_manager: StatefulBlockManager, **options: Any) -> None:
        super().__init__(block_manager, **options)
        self._prompts = self._queue = StepQueue()
        # A step's last row of a prompt goes on to the end of a cell.
        self.max_num_batched_tokens -= block_manager.cell_tokens - 1
        assert self.max_num_batched_tokens > 0

    def schedule(self) -> Schedule | None:
        manager = self.block_manager
        manager.save()
        schedule = super().schedule()
        if schedule is None:
            return None
        width = manager.blocks_for(self.max_model_len)
        new_blocks, to_zero = list(schedule.new_blocks), list(schedule.blocks_to_zero)
        for new in schedule.admissions:
            state = manager.state_of(self._sequences[new.seq_id])
            new_blocks.append(NewBlocks(new.table_idx, width, state.pages))
            to_zero += [] if state.start else state.pages
        for row in schedule.rows:
            if row.sample_position % manager.unit == 0:
                manager.begin(self._sequences[row.seq_id], row.sample_position)
        return dataclasses.replace(
            schedule,
            new_blocks=new_blocks,
            blocks_to_zero=to_zero,
            copies=manager.take_copies(),
        )

    def abandon(self, schedule: Schedule) -> None:
        super().abandon(schedule)
        self.block_manager.forget(schedule.copies)

    def _schedule_rows(self) -> tuple[list[Row], list[NewBlocks], list[Admission]]:
        found = super()._schedule_rows()
        for seq in self._queue.paused:
            self.running.remove(seq)
            self._prompts.push(seq)
            insort(self.running, seq, key=lambda s: s.order)
        self._queue.paused.clear()
        return found

    def _row_length(self, seq: Sequence, most: int) -> int:
        return self.block_manager.row_length(seq, most) if seq.is_queued else most
