"""A fake worker and an engine with tiers: pages move with their real contents.

What a load, a copy to host memory or a write to the store moves is what the pages hold then. So a
page that is reused too early, a slot that is read too late and a wrong key all give a wrong prefix.
Imports no torch.
"""

import dataclasses
import random
from collections.abc import Sequence as Seq
from typing import Any

from nanovllm.core.messages import HOST, STORE, Load, Loaded, Schedule, StepResult, TierEntry
from nanovllm.core.sequence import Sequence
from nanovllm.features.tiers.cache import TierCache
from nanovllm.features.tiers.loads import LoadHook
from nanovllm.features.tiers.tier import HostSlots, StoreTier
from nanovllm.features.tiers.traffic import TierTraffic
from nanovllm.testing.fake_engine import UNWRITTEN, FakeEngine, FakeWorker
from tests.tiers.invariants import check_tiers

Content = tuple[int, ...]
"""Of a page: its state, then its KV by offset."""


class FakeStore:
    """Contents by key. Entries may vanish or be damaged at any time."""

    def __init__(self) -> None:
        self.entries: dict[bytes, list[Content] | None] = {}  # None: damaged
        self.num_looked_up = 0

    def has(self, key: bytes) -> bool:
        self.num_looked_up += 1
        return key in self.entries


@dataclasses.dataclass(slots=True)
class _LoadInFlight:
    load: Load
    num_steps: int  # before it ends
    is_given_up: bool = False


@dataclasses.dataclass(slots=True)
class _Write:
    part: TierEntry
    contents: list[Content]  # when it was queued


class TieredWorker(FakeWorker):
    """Also has host memory, a store, and a random pace."""

    store: FakeStore
    rng: random.Random

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.host: dict[int, Content] = {}  # by slot
        self.loads: list[_LoadInFlight] = []  # oldest first
        self.writes: list[_Write] = []
        self.num_known_loads = 0

    def execute(self, schedule: Schedule) -> StepResult | None:
        """Run a step with what it moves. See `FakeWorker.execute`."""
        moved = schedule.transfers
        assert moved is not None
        self._release(moved.released)
        loaded = [self._end(load) for load in self.loads if load.is_given_up]
        self.loads = [load for load in self.loads if not load.is_given_up]
        for part in moved.stores:
            if part.tier == HOST:
                self._offload(part)
        for load in moved.loads:
            self._begin(load)
        for part in moved.stores:
            if part.tier == STORE:
                assert all(page not in _pages(w.part for w in self.writes) for page in part.pages)
                self.writes.append(_Write(part, [self.content(page) for page in part.pages]))
        while self.writes and self.rng.random() < 0.5:
            self._write()
        for load in self.loads:
            load.num_steps -= 1
        loaded += [self._end(load) for load in self.loads if load.num_steps < 0]
        if moved.awaited and not loaded and self.loads:
            loaded.append(self._end(self.loads[0]))
        self.loads = [x for x in self.loads if x.load.load_id not in {y.load_id for y in loaded}]
        result = super().execute(schedule)
        if result is None:
            return None
        return dataclasses.replace(result, loaded=loaded)

    def content(self, page: int) -> Content:
        kv = (self.kv.get((page, offset), UNWRITTEN) for offset in range(self.block_size))
        return (self.states.get(page, UNWRITTEN), *kv)

    def finish_writes(self) -> None:
        while self.writes:
            self._write()

    def _set_content(self, page: int, content: Content) -> None:
        self.states[page] = content[0]
        for offset in range(self.block_size):
            self.kv[page, offset] = content[1 + offset]
            self.writers[page, offset] = UNWRITTEN

    def _release(self, pages: Seq[int]) -> None:
        """End or give up what moves `pages`."""
        while any(page in pages for write in self.writes for page in write.part.pages):
            if self.rng.random() < 0.5:
                self._write()
            else:
                self.writes = [w for w in self.writes if not {*w.part.pages} & {*pages}]
        for load in self.loads:
            load.is_given_up |= bool(_pages(load.load.parts) & {*pages})

    def _offload(self, part: TierEntry) -> None:
        reading = {slot for load in self.loads for p in load.load.parts for slot in p.slots}
        assert reading.isdisjoint(part.slots), "a slot is reused while a load reads it"
        for page, slot in zip(part.pages, part.slots, strict=True):
            garbage = (UNWRITTEN,) * (1 + self.block_size)
            self.host[slot] = garbage if self.is_broken else self.content(page)

    def _begin(self, load: Load) -> None:
        pages = _pages(load.parts)
        assert len(pages) == sum(len(part.pages) for part in load.parts), "a page is loaded twice"
        assert pages.isdisjoint(_pages(p for x in self.loads for p in x.load.parts))
        for page in pages:
            self._set_content(page, self._marks(load))
        self.loads.append(_LoadInFlight(load, self.rng.choice((0, 0, 0, 1, 2, 5))))

    def _marks(self, load: Load) -> Content:
        """Return what stands for a page that is being filled."""
        return (-100 - load.load_id,) * (1 + self.block_size)

    def _end(self, flight: _LoadInFlight) -> Loaded:
        """Fill the pages of a load, up to the first part that is missing or wrong."""
        load = flight.load
        if flight.is_given_up:
            return Loaded(load.load_id, 0, 0.0)
        for number, part in enumerate(load.parts):
            found: list[Content] | None = [self.host.get(slot, ()) for slot in part.slots]
            if part.tier == STORE:
                assert not part.slots
                found = self.store.entries.get(part.key)
                if found is None:  # the store has removed what it cannot read
                    self.store.entries.pop(part.key, None)
                    return Loaded(load.load_id, number, 0.01)
            assert found is not None
            assert len(found) == len(part.pages), "an entry of another size"
            for page, content in zip(part.pages, found, strict=True):
                assert self.content(page) == self._marks(load), "a page is written while it loads"
                self._set_content(page, content)
        return Loaded(load.load_id, len(load.parts), 0.01)

    def _write(self) -> None:
        write = self.writes.pop(0)
        contents = [self.content(page) for page in write.part.pages]
        assert contents == write.contents, "a page changed before it was written"
        self.store.entries[write.part.key] = contents


class TieredEngine(FakeEngine):
    """An engine with tiers below its pool.

    Args:
        num_host_slots: 0: no host memory.
        store: None: no byte store. It may have entries of an earlier engine.
        seed: of the worker's pace.
        options: of `FakeEngine`.
    """

    steps_per_token = 12
    # A sequence comes back from its load when others, later in order, are running. It may then be
    # admitted, and one of these preempt itself. A window block may be freed behind an admission.
    is_strict = False
    worker: TieredWorker

    def __init__(
        self,
        *,
        num_host_slots: int = 0,
        store: FakeStore | None = None,
        seed: int = 0,
        token_seconds: float = 0.0,
        **options: Any,
    ) -> None:
        host = HostSlots(num_host_slots) if num_host_slots else None
        tier = None if store is None else StoreTier(store.has)
        self.traffic = TierTraffic(host, tier, token_seconds=token_seconds)
        tiers = TierCache(self.traffic)
        self.loads = LoadHook(tiers)
        hooks = [*options.pop("hooks", ()), self.loads]
        super().__init__(hooks=hooks, **options)
        self.worker.store = store or FakeStore()
        self.worker.rng = random.Random(seed)

    def make_worker(self, *args: Any) -> TieredWorker:
        return TieredWorker(*args)

    def launch(self, *, fails_to_launch: bool = False) -> Schedule | None:
        schedule = super().launch(fails_to_launch=fails_to_launch)
        check_tiers(self.loads)
        return schedule

    def run(self) -> None:
        super().run()
        assert not self.loads._loads
        assert not self.loads._parked
        assert not self.traffic.has_unsent

    def _check_turns(self, admitted: list[Sequence], waiting: list[Sequence]) -> None:
        """Sequences that waited for a load may be passed by others of their user."""

    def _check_rows_of(self, admitted: list[Sequence], rows: list[Sequence]) -> None:
        loading = [seq for seq in admitted if seq in self.loads._loading]
        assert all(seq not in rows for seq in loading), "a sequence is computed while it loads"
        super()._check_rows_of([seq for seq in admitted if seq not in loading], rows)

    def _may_be_empty(self, schedule: Schedule) -> bool:
        moved = schedule.transfers
        assert moved is not None
        assert not (moved.awaited and schedule.rows)
        return bool(schedule.admissions or moved.awaited or moved.stores or schedule.copies)


def _pages(parts: Any) -> set[int]:
    return {page for part in parts for page in part.pages}
