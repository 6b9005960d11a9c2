"""What tiers add to a scheduler: sequences that load, and what a step moves."""

import dataclasses

from nanovllm.core.messages import HOST, Load, Loaded, Schedule, StepResult
from nanovllm.core.sequence import Sequence
from nanovllm.features.tiers.cache import Plan, TierCache
from nanovllm.kv.trie import Hit
from nanovllm.scheduler.admission_hook import AdmissionHook
from nanovllm.scheduler.scheduler import Scheduler


class LoadHook(AdmissionHook):
    """Holds back sequences that load, and those that need what others are loading.

    Invariants, verified by tests/tiers/invariants.py:
    - A block that is being loaded is not cached. So nobody hits it before its KV is there.
    - A loading sequence is running, and held. It has no row, and none of its steps is in flight.
      What it loads counts as computed.
    - A parked sequence waits, held by no policy, for a load in flight.

    A sequence gets its table row and all its blocks before it loads. When the load has ended its
    blocks are published, and it goes on as a prompt whose first tokens are computed. If a part was
    wrong, those before it are published and the sequence is preempted. It comes back with what the
    pool has then, and loads no more. So a bad tier costs time, but never a request.

    A step that fails may take the news of ended loads with it. So it ends all loads: their
    sequences are preempted, too.

    If there is nothing to compute and no step is in flight, a step without rows waits for the
    oldest load. What is to be written to the store goes with the next step, or with one of its own.
    """

    def __init__(self, cache: TierCache) -> None:
        self.cache = cache
        self.traffic = cache.traffic
        self._plan: Plan | None = None  # of the admission that runs
        self._loads: dict[int, Plan] = {}  # in flight, by id
        self._loading: dict[Sequence, Plan] = {}
        self._loading_keys: set[bytes] = set()  # of the KV blocks in these loads
        self._parked: list[Sequence] = []  # unfinished ones and finished ones
        self._without_loads: set[Sequence] = set()  # unfinished, those with a load that failed
        self._unsent: list[Load] = []  # for the next step
        self._num_loads = 0  # ever
        self._num_steps = 0  # in flight

    def attach(self, scheduler: Scheduler) -> None:
        super().attach(scheduler)
        self.cache.attach(scheduler.block_manager)
        scheduler.stats.tiers = self.traffic.stats

    @property
    def has_work(self) -> bool:
        """Whether writing to the store is left to begin."""
        return self.traffic.has_unsent

    def holds(self, seq: Sequence) -> bool:
        """Park a sequence if it needs blocks that are being loaded: many prompts with a common
        prefix load it once.
        """
        if not self._loads or not self.cache.waits_for(seq, self._loading_keys):
            return False
        self.scheduler.suspend(seq)
        self._parked.append(seq)
        return True

    def prepare(self, seq: Sequence, hit: Hit) -> Hit:
        """Return a longer prefix, if the tiers have one. What is to be loaded is pinned: it must
        survive the evictions that make room for it.
        """
        if seq in self._without_loads:
            return hit
        plan = self._plan = self.cache.plan(seq, hit)
        if plan is None:
            return hit
        plan.parts = [self.traffic.begin(entry.tier, entry.key) for entry in plan.found]
        plan.is_resumption = seq.was_admitted
        return Hit(hit.matched, plan.num_blocks, frozenset(plan.places))

    def cancel(self, seq: Sequence) -> None:
        if self._plan is not None:
            self.traffic.unpin(self._plan.parts)
            self._plan = None

    def admitted(self, seq: Sequence, hit: Hit) -> None:
        """Let a sequence that has something to load wait for it, and others go on."""
        plan = self._plan
        self._plan = None
        if plan is None:
            self.traffic.retry_slow()
            return
        group_of = self.scheduler.block_manager.group_of
        plan.parts = [
            part._replace(pages=group_of[entry.suffix].pages_of(seq, entry.block_index))
            for entry, part in zip(plan.found, plan.parts, strict=True)
        ]
        plan.load_id = self._num_loads
        self._num_loads += 1
        self._loads[plan.load_id] = plan
        self._loading[seq] = plan
        self._loading_keys |= self._kv_keys(plan)
        self._unsent.append(Load(plan.load_id, plan.parts))
        seq.is_held = True
        self.scheduler.suspend(seq)

    def needs_step(self) -> bool:
        """Return whether a load or the store waits for a step, and none is in flight."""
        return not self._num_steps and bool(self._loads or self.traffic.has_unsent)

    def fill_step(self, schedule: Schedule) -> Schedule:
        touched = {page for copy in schedule.copies for page in (*copy.sources, *copy.targets)}
        # A load begins before the copies of its step, and may end after them.
        loads = [x for x in self._unsent if touched.isdisjoint(p for y in x.parts for p in y.pages)]
        self._unsent = [load for load in self._unsent if load not in loads]
        is_idle = not (schedule.rows or self._num_steps)
        awaited = is_idle and len(self._loads) > len(self._unsent)
        self._num_steps += 1
        return dataclasses.replace(schedule, transfers=self.traffic.take(loads, awaited=awaited))

    def update(self, schedule: Schedule, result: StepResult) -> None:
        """End the loads that a result tells of."""
        self._num_steps -= 1
        for loaded in result.loaded:
            self._end_load(loaded)

    def abandon(self, schedule: Schedule) -> None:
        self._num_steps -= 1
        for seq in list(self._loading):
            self.scheduler.preempt(seq)
        assert schedule.transfers is not None
        self.traffic.undo(schedule.transfers)

    def release(self, seq: Sequence) -> None:
        """Give up the load of a sequence that loses its pages."""
        plan = self._loading.get(seq)
        if plan is not None:
            self._stop_loading(plan)
            self.traffic.give_up(plan.parts)

    def remove(self, seq: Sequence) -> None:
        self._without_loads.discard(seq)

    def _end_load(self, loaded: Loaded) -> None:
        """Let a loaded sequence go on. The load is unknown if the sequence lost its blocks."""
        plan = self._loads.get(loaded.load_id)
        if plan is None:
            return
        seq = plan.seq
        self._stop_loading(plan)
        self.traffic.end(plan.parts, loaded)
        is_complete = loaded.num_parts == len(plan.parts)
        num_blocks = plan.num_blocks
        if not is_complete:
            num_blocks = plan.found[loaded.num_parts].block_index
        manager = self.scheduler.block_manager
        manager.publish_loaded(seq, num_blocks, plan.places[: loaded.num_parts])
        self._count(plan, loaded.num_parts)
        if is_complete:
            self.scheduler.count_prompt(seq)
            self.scheduler.resume(seq)
        else:
            self._without_loads.add(seq)
            self.scheduler.preempt(seq)

    def _stop_loading(self, plan: Plan) -> None:
        """Note that a load is over, and let those that waited for it try again."""
        del self._loads[plan.load_id], self._loading[plan.seq]
        plan.seq.is_held = False
        self._loading_keys -= self._kv_keys(plan)
        self._unsent = [load for load in self._unsent if load.load_id != plan.load_id]
        parked = self._parked
        self._parked = []
        for seq in parked:
            if self.scheduler.is_unfinished(seq):
                self.scheduler.resume(seq)

    def _count(self, plan: Plan, num_parts: int) -> None:
        stats = self.traffic.stats
        size = self.scheduler.block_manager.block_size
        suffix = self.scheduler.block_manager.full.suffix
        for entry in plan.found[:num_parts]:
            if entry.suffix == suffix:
                stats.num_host_tokens += size * (entry.tier == HOST)
                stats.num_store_tokens += size * (entry.tier != HOST)
                stats.num_swapped_tokens += size * plan.is_resumption

    def _kv_keys(self, plan: Plan) -> set[bytes]:
        suffix = self.scheduler.block_manager.full.suffix
        return {entry.key for entry in plan.found if entry.suffix == suffix}
