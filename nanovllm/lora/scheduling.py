"""What adapters add to a scheduler: at most so many of them run at once, each in a slot.

`AdapterScheduling` goes before a scheduler in a class's bases; `with_adapters` makes the class.
Knows no files and no tensors.
"""

from itertools import islice
from typing import Any

from nanovllm.lora.slot_table import SlotTable
from nanovllm.lora.waiting_room import WaitingRoom, adapter_of, key_of
from nanovllm.scheduler.block_manager import BlockManager
from nanovllm.scheduler.messages import Admission, Schedule
from nanovllm.scheduler.scheduler import Scheduler
from nanovllm.scheduler.sequence import Sequence


class AdapterScheduling(Scheduler):
    """A scheduler of sequences with adapters.

    Invariants, beside those of its bases, verified by tests/lora/invariants.py:
    - A running sequence's adapter has the slot that its `AdapterSlot` names, and is pinned there.
    - A sequence in the waiting room waits: it is in no queue, and has no table row.

    **No head blocks the others.** A sequence whose turn has come while all slots are pinned goes to
    the waiting room, and the queue goes on. There it counts as admitted and preempted, so it keeps
    its turn. When a slot can be had, the first that waits comes back to the queue. Others of its
    adapter follow one by one, each when the one before it is admitted, so a step's cost does not
    depend on how many wait.

    **No adapter starves another.** The first sequence of each adapter that waits claims a slot: the
    least recently used one that is pinned and not claimed. The adapter that has it gets only
    sequences that come before the claimant in the queue's order. So its running ones end, and the
    slot is free after at most the time that these take.

    Args:
        max_loras: number of slots.
    """

    def __init__(self, block_manager: BlockManager, *, max_loras: int, **options: Any) -> None:
        super().__init__(block_manager, **options)
        self.slots = SlotTable(max_loras)
        self._room = WaitingRoom()
        self._claims: dict[str, Sequence] = {}  # the claimant, by adapter that has the slot
        self._recalled: dict[str, Sequence] = {}  # back in the queue, by adapter; one for each
        self._new: set[Sequence] = set()  # that wait for a slot, and were never admitted
        self._prompts.defer.insert(0, self._defer)

    @property
    def waiting_adapters(self) -> int:
        """Number of adapters that wait for a slot."""
        return len(self._room)

    def schedule(self) -> Schedule | None:
        """Return the next step; None if nothing can run now. See `Scheduler.schedule`."""
        if len(self._room):
            self._recall()
            self._claim()
        return super().schedule()

    def _defer(self, seq: Sequence) -> bool:
        """Let a sequence whose turn has come wait outside the queue, if it can have no slot."""
        if seq.adapter is None or self._may_go(seq):
            return False
        if not seq.was_admitted:
            seq.num_cached_tokens = 0
            self._new.add(seq)
        self._prompts.leave(seq)
        self._forget_recalled(seq)
        self._room.add(seq)
        return True

    def _may_go(self, seq: Sequence) -> bool:
        """Return whether a sequence can have a slot now that is claimed by none before it."""
        digest = adapter_of(seq)
        claimant = self._claims.get(digest)
        if digest in self.slots.slots:
            return claimant is None or key_of(seq) < key_of(claimant)
        return self.slots.find(digest) is not None

    def _recall(self) -> None:
        """Let those back into the queue that can have a slot: one of each adapter."""
        for digest in list(self.slots.slots):
            self._recall_next(digest)
        num_taken = sum(digest not in self.slots.slots for digest in self._recalled)
        num_left = self.slots.num_available - num_taken
        for seq in self._without_slot(num_left):
            self._bring_back(seq)

    def _recall_next(self, digest: str) -> None:
        """Let the next sequence of an adapter with a slot back into the queue, if it may go."""
        seq = self._room.first_of(digest)
        if seq is not None and digest not in self._recalled and self._may_go(seq):
            self._bring_back(seq)

    def _claim(self) -> None:
        """Claim slots for those that wait."""
        victims = [digest for digest in self.slots.pinned if digest not in self._claims]
        claimants = [adapter_of(seq) for seq in self._claims.values()]
        self._claims.update(
            zip(victims, self._without_slot(len(victims), *claimants), strict=False)
        )

    def _without_slot(self, most: int, *but: str) -> list[Sequence]:
        """Return the first sequences that wait of adapters without a slot, in order.

        Args:
            most: how many.
            but: leave these adapters out, too.
        """
        firsts = (
            seq
            for seq in self._room.firsts()
            if adapter_of(seq) not in self.slots.slots
            and adapter_of(seq) not in self._recalled
            and adapter_of(seq) not in but
        )
        return list(islice(firsts, max(0, most)))

    def _bring_back(self, seq: Sequence) -> None:
        self._room.remove(seq)
        self._recalled[adapter_of(seq)] = seq
        self._prompts.push(seq)

    def _admit(self, seq: Sequence) -> Admission | None:
        if seq.adapter is None:
            return super()._admit(seq)
        digest = seq.adapter.digest
        place = self.slots.find(digest)
        assert place is not None  # `_defer` saw to it
        seq.adapter = seq.adapter._replace(slot=place.slot)
        if seq in self._new:
            seq.num_cached_tokens = None
        admission = super()._admit(seq)
        if admission is None:
            if seq in self._new:
                seq.num_cached_tokens = 0
            return None
        self._new.discard(seq)
        self._forget_recalled(seq)
        if digest not in self.slots.slots:
            claims = self._claims.items()
            self._claims = {
                holder: claimant
                for holder, claimant in claims
                if holder != place.evicted and adapter_of(claimant) != digest
            }
        self.slots.take(digest, place)
        self._recall_next(digest)
        return admission

    def _release(self, seq: Sequence) -> None:
        super()._release(seq)
        if seq.adapter is not None:
            self.slots.let_go(seq.adapter.digest)

    def _remove(self, seq: Sequence) -> None:
        super()._remove(seq)
        if seq.adapter is None:
            return
        if seq in self._room:
            self._room.remove(seq)
        self._forget_recalled(seq)
        self._claims = {
            holder: claimant for holder, claimant in self._claims.items() if claimant is not seq
        }
        if seq in self._new:
            self._new.discard(seq)
            seq.num_cached_tokens = None

    def _forget_recalled(self, seq: Sequence) -> None:
        if self._recalled.get(adapter_of(seq)) is seq:
            del self._recalled[adapter_of(seq)]


def with_adapters(make: type[Scheduler]) -> type[Scheduler]:
    """Return the scheduler that knows adapters and is otherwise like `make`."""
    return type(f"Adapter{make.__name__}", (AdapterScheduling, make), {})
