"""What tiers add to a scheduler: sequences that load, and what a step moves.

`TieredScheduling` goes before a scheduler in a class's bases. `with_tiers` picks the classes.
Knows no tensors.
"""

import dataclasses
from bisect import insort
from typing import Any

from nanovllm.scheduler.messages import Admission, Schedule, StepResult
from nanovllm.scheduler.scheduler import Scheduler
from nanovllm.scheduler.sequence import Sequence
from nanovllm.scheduler.snapshots import Snapshot
from nanovllm.scheduler.stateful import StatefulScheduler
from nanovllm.scheduler.tiered_blocks import KV, Plan, TieredBlocks
from nanovllm.scheduler.tiered_states import TieredStatefulBlockManager
from nanovllm.scheduler.tiered_windows import TieredWindowedBlockManager
from nanovllm.scheduler.transfers import HOST, Load, Loaded
from nanovllm.scheduler.windowed import WindowedScheduler


class TieredScheduling(Scheduler):
    """A scheduler with tiers, by itself that of a model that has KV blocks alone.

    Invariants, beside those of its bases, verified by tests/scheduler/invariants.py:
    - A loading sequence is running and not queued. It has no row, and none of its steps is in
      flight. What it loads counts as computed.
    - A parked sequence waits, outside the queue, for a load in flight.

    A sequence gets its table row and all its blocks before it loads. When the load has ended its
    blocks are published, and it goes on as a prompt whose first tokens are computed. If a part was
    wrong, those before it are published and the sequence is preempted. It comes back with what the
    pool has then, and loads no more. So a bad tier costs time, and no request.

    A step that fails may take the news of ended loads with it. So it ends all loads: their
    sequences are preempted, too.

    If there is nothing to compute and no step is in flight, a step without rows waits for the
    oldest load. What is to be written to the store goes with the next step, or with one of its own.
    """

    block_manager: TieredBlocks

    def __init__(self, block_manager: TieredBlocks, **options: Any) -> None:
        super().__init__(block_manager, **options)
        self.traffic = block_manager.traffic
        self.stats.tiers = self.traffic.stats
        self._loads: dict[int, Plan] = {}  # in flight, by id
        self._loading: dict[Sequence, Plan] = {}
        self._loading_keys: set[bytes] = set()  # of the KV blocks in these loads
        self._parked: list[Sequence] = []  # unfinished ones and finished ones
        self._unsent: list[Load] = []  # for the next step
        self._num_loads = 0  # ever
        self._num_steps = 0  # in flight
        self._uncounted: set[Sequence] = set()  # whose first admission gave nothing in the end
        self._prompts.defer.append(self._park)

    @property
    def num_unfinished(self) -> int:
        """How many sequences are unfinished; 1 if only writing to the store is left to begin."""
        return len(self._sequences) or int(self.traffic.has_unsent)

    def schedule(self) -> Schedule | None:
        found = super().schedule()
        if found is None:
            if self._num_steps or not (self._loads or self.traffic.has_unsent):
                return None
            found = self._empty_step()
        touched = {page for copy in found.copies for page in (*copy.sources, *copy.targets)}
        # A load begins before the copies of its step, and may end after them.
        loads = [x for x in self._unsent if touched.isdisjoint(p for y in x.parts for p in y.pages)]
        self._unsent = [load for load in self._unsent if load not in loads]
        awaited = not (found.rows or self._num_steps) and len(self._loads) > len(self._unsent)
        self._num_steps += 1
        return dataclasses.replace(found, transfers=self.traffic.take(loads, awaited=awaited))

    def update(self, schedule: Schedule, result: StepResult) -> list[Sequence]:
        """Append a step's tokens, and end the loads that it tells of. See `Scheduler.update`."""
        self._num_steps -= 1
        advanced = super().update(schedule, result)
        for loaded in result.loaded:
            self._end_load(loaded)
        return advanced

    def abandon(self, schedule: Schedule) -> None:
        self._num_steps -= 1
        for seq in list(self._loading):
            self._preempt(seq)
        super().abandon(schedule)
        assert schedule.transfers is not None
        self.traffic.undo(schedule.transfers)

    def _empty_step(self) -> Schedule:
        return Schedule(next(self._step_ids), [], [], [])

    def _park(self, seq: Sequence) -> bool:
        """Let a sequence whose turn has come wait, if it needs blocks that are being loaded.

        Else many prompts with a common prefix would each load it, and hold its blocks. It counts as
        admitted and preempted, with the turn that it had.
        """
        if not self._loads or not self.block_manager.waits_for(seq, self._loading_keys):
            return False
        if not seq.was_admitted:
            seq.num_cached_tokens = 0
            self.stats.count_prompt(seq.num_prompt_tokens, 0, queries=True)
            self._uncounted.add(seq)
        self._prompts.leave(seq)
        self._parked.append(seq)
        return True

    def _admit(self, seq: Sequence) -> Admission | None:
        is_resumption = seq.was_admitted and seq not in self._uncounted
        admission = super()._admit(seq)
        if admission is None:
            return None
        if seq in self._uncounted:
            self._uncounted.remove(seq)
            seq.num_cached_tokens = seq.num_computed_tokens
            self.stats.num_cached_tokens += seq.num_computed_tokens
        plan = self.block_manager.take_plan()
        if plan is None:
            self.traffic.retry_slow()
        else:
            plan.is_resumption = is_resumption
            self._begin_load(seq, plan)
        return admission

    def _begin_load(self, seq: Sequence, plan: Plan) -> None:
        """Let a sequence that was just admitted wait for a load, and others go on."""
        plan.load_id = self._num_loads
        self._num_loads += 1
        self._loads[plan.load_id] = self._loading[seq] = plan
        self._loading_keys.update(_kv_keys(plan))
        self._unsent.append(Load(plan.load_id, plan.parts))
        self.running.remove(seq)
        self._prompts.leave(seq)
        insort(self.running, seq, key=lambda s: s.order)

    def _end_load(self, loaded: Loaded) -> None:
        """Let a loaded sequence go on. The load is unknown if the sequence lost its blocks."""
        plan = self._loads.get(loaded.load_id)
        if plan is None:
            return
        seq = plan.seq
        self._stop_loading(plan)
        self.traffic.end(plan.parts, loaded)
        self.block_manager.publish_loaded(plan, loaded.num_parts)
        self._count(plan, loaded.num_parts)
        if loaded.num_parts < len(plan.parts):
            self.block_manager.without_loads.add(seq)
            self._uncount(plan)
            self._preempt(seq)
            return
        self.running.remove(seq)
        self._prompts.push(seq)
        insort(self.running, seq, key=lambda s: s.order)

    def _stop_loading(self, plan: Plan) -> None:
        """Note that a load is over, and let those that waited for it try again."""
        del self._loads[plan.load_id], self._loading[plan.seq]
        self._loading_keys.difference_update(_kv_keys(plan))
        self._unsent = [load for load in self._unsent if load.load_id != plan.load_id]
        parked, self._parked = self._parked, []
        for seq in parked:
            if seq.seq_id in self._sequences:
                self._prompts.push(seq)

    def _count(self, plan: Plan, num_parts: int) -> None:
        stats = self.traffic.stats
        for entry in plan.found[:num_parts]:
            if entry.suffix == KV:
                size = self.block_manager.block_size
                stats.num_host_tokens += size * (entry.tier == HOST)
                stats.num_store_tokens += size * (entry.tier != HOST)
                stats.num_swapped_tokens += size * plan.is_resumption

    def _uncount(self, plan: Plan) -> None:
        """Let the prefix hit of a first admission be that of the next one."""
        seq = plan.seq
        if not plan.is_resumption:
            self.stats.num_cached_tokens -= seq.num_cached_tokens or 0
            seq.num_cached_tokens = 0
            self._uncounted.add(seq)

    def _num_missing_tokens(self, seq: Sequence) -> int:
        return 0 if seq in self._loading else super()._num_missing_tokens(seq)

    def _release(self, seq: Sequence) -> None:
        plan = self._loading.get(seq)
        if plan is not None:
            self._stop_loading(plan)
            self._uncount(plan)
            self.traffic.give_up(plan.parts)
        super()._release(seq)

    def _remove(self, seq: Sequence) -> None:
        super()._remove(seq)
        self.block_manager.without_loads.discard(seq)
        self._uncounted.discard(seq)


class TieredWindowedScheduler(TieredScheduling, WindowedScheduler):
    """A scheduler with tiers, of a model with window groups."""

    block_manager: TieredWindowedBlockManager


class TieredStatefulScheduler(TieredScheduling, StatefulScheduler):
    """A scheduler with tiers, of a model whose layers have a state."""

    block_manager: TieredStatefulBlockManager

    def __init__(self, block_manager: TieredStatefulBlockManager, **options: Any) -> None:
        super().__init__(block_manager, **options)
        self._copied: dict[int, list[Snapshot]] = {}  # by id of a step in flight

    def schedule(self) -> Schedule | None:
        schedule = super().schedule()
        if schedule is not None:
            self._copied[schedule.step_id] = self.block_manager.copies_to(schedule.copies)
        return schedule

    def update(self, schedule: Schedule, result: StepResult) -> list[Sequence]:
        advanced = super().update(schedule, result)
        for snapshot in self._copied.pop(schedule.step_id):
            self.block_manager.offer_snapshot(snapshot)
        return advanced

    def abandon(self, schedule: Schedule) -> None:
        super().abandon(schedule)
        del self._copied[schedule.step_id]

    def _empty_step(self) -> Schedule:
        # Each step makes the copies that were noted before it: see `StatefulBlockManager`.
        return dataclasses.replace(super()._empty_step(), copies=self.block_manager.take_copies())


def _kv_keys(plan: Plan) -> set[bytes]:
    return {entry.key for entry in plan.found if entry.suffix == KV}


def with_tiers(
    make: type[Scheduler],
) -> tuple[type[TieredScheduling], type[TieredBlocks]]:
    """Return the scheduler that has tiers and is otherwise like `make`, and its block manager."""
    if issubclass(make, WindowedScheduler):
        return TieredWindowedScheduler, TieredWindowedBlockManager
    if issubclass(make, StatefulScheduler):
        return TieredStatefulScheduler, TieredStatefulBlockManager
    return TieredScheduling, TieredBlocks
