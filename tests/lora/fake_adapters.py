"""A fake worker and engines with adapters: what a slot holds decides the tokens of its rows.

So a slot that is reused too early, and a prefix of another adapter, give wrong tokens. Imports no
torch.
"""

import random
from collections import Counter
from typing import Any

from nanovllm.core.messages import AdapterSlot, Schedule, StepResult
from nanovllm.core.sequence import Sequence
from nanovllm.features.lora.scheduling import AdapterHook
from nanovllm.testing.fake_engine import FakeEngine, FakeWorker
from tests.tiers.fake_tiers import TieredEngine, TieredWorker

DIGEST_LENGTH = 64


def adapter(number: int) -> AdapterSlot:
    return AdapterSlot(-1, f"/adapters/{number}", f"{number:0{DIGEST_LENGTH}x}")


def check_adapters(hook: AdapterHook) -> None:
    """Verify every invariant of slots, pins, claims and the waiting room.

    Raises:
        AssertionError: a slot or a pin is lost, or too many adapters run.
    """
    table, scheduler = hook.slots, hook.scheduler
    assert sorted([*table.slots.values(), *table._free]) == list(range(table.num_slots))
    running = [seq.adapter for seq in scheduler.running if seq.adapter is not None]
    assert table._pins == Counter(used.digest for used in running)
    assert table._unpinned.keys() == table.slots.keys() - table._pins.keys()
    assert all(table.slots[used.digest] == used.slot for used in running)
    for seq in hook._room:
        assert scheduler.is_unfinished(seq), "a finished sequence waits"
        assert seq.table_idx is None
        assert not seq.is_queued
    for digest, seq in hook._recalled.items():
        assert seq.adapter is not None
        assert seq.adapter.digest == digest
        assert seq.table_idx is None
        assert scheduler.is_unfinished(seq)
    for holder, claimant in hook._claims.items():
        assert holder in table.slots
        assert claimant.adapter is not None
        assert claimant.adapter.digest not in table.slots
        assert claimant in hook._room or claimant in hook._recalled.values()
    claimants = [seq.adapter for seq in hook._claims.values()]
    assert len({*claimants}) == len(claimants), "an adapter claims two slots"
    assert all(seq.table_idx is None for seq in hook._keys)
    assert {*hook._room, *hook._recalled.values()} <= hook._keys.keys()


class AdapterWorker(FakeWorker):
    """Loads what an admission names into the slot that it names, if the slot holds another."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.slots: dict[int, str] = {}
        self.slot_of: dict[int, int] = {}  # by table row
        self.num_loaded = 0

    def execute(self, schedule: Schedule) -> StepResult | None:
        for new in schedule.admissions:
            self.slot_of.pop(new.table_idx, None)
            if new.adapter is not None:
                self.slot_of[new.table_idx] = new.adapter.slot
                self.num_loaded += self.slots.get(new.adapter.slot) != new.adapter.digest
                self.slots[new.adapter.slot] = new.adapter.digest
        return super().execute(schedule)

    def start_of(self, table_idx: int) -> int:
        slot = self.slot_of.get(table_idx)
        return 0 if slot is None else 1 + int(self.slots[slot], 16)


class TieredAdapterWorker(AdapterWorker, TieredWorker):
    """The same with tiers."""


class AdapterEngine(FakeEngine):
    """An engine with adapters.

    Args:
        num_adapters: 0: sequences have the adapter that `add` gets; else a random one, or none.
    """

    is_strict = False  # a sequence that waited for a slot comes when others, later in order, run
    is_fifo = False
    worker: AdapterWorker

    def __init__(self, *, max_loras: int = 2, num_adapters: int = 0, **options: Any) -> None:
        self.adapters = AdapterHook(max_loras)
        self.num_adapters = num_adapters
        self.rng = random.Random(num_adapters)
        super().__init__(hooks=[self.adapters], **options)

    def make_worker(self, *args: Any) -> FakeWorker:
        return AdapterWorker(*args)

    def start_of(self, root: str) -> int:
        has_adapter = len(root) > DIGEST_LENGTH and root[0] in "0123456789abcdef"
        return 1 + int(root[:DIGEST_LENGTH], 16) if has_adapter else 0

    def add(self, *args: Any, **options: Any) -> Sequence:
        number = self.rng.randrange(-1, self.num_adapters) if self.num_adapters else -1
        if number >= 0:
            options["adapter"] = adapter(number)
        return super().add(*args, **options)

    def launch(self, *, fails_to_launch: bool = False) -> Schedule | None:
        schedule = super().launch(fails_to_launch=fails_to_launch)
        check_adapters(self.adapters)
        for new in [] if schedule is None else schedule.admissions:
            seq = self.sequences[new.seq_id]
            key = (seq.priority, True, seq.turn, seq.seq_id)
            key = key if self.has_default_policy else self.scheduler.policy.order(seq)
            claimant = (
                None if new.adapter is None else self.adapters._claims.get(new.adapter.digest)
            )
            assert claimant is None or key < self.adapters._keys[claimant], "it was passed over"
        return schedule

    def run(self) -> None:
        super().run()
        check_adapters(self.adapters)
        assert not [*self.adapters._room]
        assert not self.adapters._recalled
        assert not self.adapters._claims
        assert not self.adapters._keys

    def _check_turns(self, admitted: list[Sequence], waiting: list[Sequence]) -> None:
        """Check that the admitted are the first of their user and adapter: one that waits for a
        slot may be passed by others.
        """
        waiting = sorted(waiting, key=lambda seq: (seq.priority, seq.seq_id))
        for seq in admitted:
            assert seq is next(other for other in waiting if kind_of(other) == kind_of(seq))
            waiting.remove(seq)


def kind_of(seq: Sequence) -> tuple[str, str | None]:
    """Return the user and the adapter of a sequence."""
    return seq.user, None if seq.adapter is None else seq.adapter.digest


class TieredAdapterEngine(AdapterEngine, TieredEngine):
    """The same with tiers."""

    def make_worker(self, *args: Any) -> TieredWorker:
        return TieredAdapterWorker(*args)

    def _check_turns(self, admitted: list[Sequence], waiting: list[Sequence]) -> None:
        """Check the same, except that others pass one that waits for another's load."""
        super()._check_turns(admitted, [s for s in waiting if s not in self.loads._parked])
