"""What adapters add to a scheduler: at most so many of them run at once, each in a slot."""

from bisect import bisect
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

from nanovllm.core.sequence import Sequence
from nanovllm.kv.trie import Hit
from nanovllm.scheduler.admission_hook import AdmissionHook
from nanovllm.scheduler.heap import Heap


class SlotChoice(NamedTuple):
    """Where an adapter would go."""

    slot: int
    evicted: str | None
    """The adapter that has the slot now; None if it is free, or the adapter's own."""


class SlotTable:
    """Slots of adapters, by digest, in LRU order of their last admission.

    Invariants, verified by tests/lora/fake_adapters.py:
    - A slot is free, or has one adapter. At most `num_slots` adapters have one.
    - An adapter with a pin has a slot, and keeps it.
    - An adapter's pins are the running sequences that have it.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.slots: OrderedDict[str, int] = OrderedDict()  # the least recently admitted first
        self._free = list(reversed(range(num_slots)))
        self._unpinned: OrderedDict[str, None] = OrderedDict()  # those in slots, in LRU order
        self._pins: dict[str, int] = {}  # none is 0

    @property
    def num_available(self) -> int:
        """How many slots another adapter can have."""
        return len(self._free) + len(self._unpinned)

    @property
    def pinned(self) -> list[str]:
        """The adapters that running sequences have, the least recently admitted first."""
        return [digest for digest in self.slots if digest in self._pins]

    def find(self, digest: str) -> SlotChoice | None:
        """Return where an adapter is, or would go; None if all slots are pinned."""
        if digest in self.slots:
            return SlotChoice(self.slots[digest], None)
        if self._free:
            return SlotChoice(self._free[-1], None)
        evicted = next(iter(self._unpinned), None)
        return None if evicted is None else SlotChoice(self.slots[evicted], evicted)

    def take(self, digest: str, place: SlotChoice) -> None:
        """Let a running sequence have an adapter, at the place that `find` returned."""
        if digest not in self.slots:
            if place.evicted is None:
                assert self._free[-1] == place.slot
                self._free.pop()
            else:
                del self.slots[place.evicted], self._unpinned[place.evicted]
            self.slots[digest] = place.slot
        self.slots.move_to_end(digest)
        self._unpinned.pop(digest, None)
        self._pins[digest] = self._pins.get(digest, 0) + 1

    def let_go(self, digest: str) -> None:
        """Count one running sequence less that has an adapter."""
        self._pins[digest] -= 1
        if self._pins[digest] == 0:
            del self._pins[digest]
            self._unpinned[digest] = None


Key = Any
"""Sorts waiting sequences as their policy does: `Policy.order` when their turn came."""


def adapter_of(seq: Sequence) -> str:
    """Return the digest of a sequence's adapter; it has one."""
    assert seq.adapter is not None
    return seq.adapter.digest


class WaitingRoom:
    """Waiting sequences by adapter. Each operation costs amortised O(log n)."""

    def __init__(self) -> None:
        self._keys: dict[Sequence, Key] = {}
        self._sequences: dict[str, Heap[Sequence]] = {}  # by adapter; none is empty
        self._adapters: Heap[str] = Heap()  # by the key of their first sequence

    def __iter__(self) -> Iterator[Sequence]:
        """Yield all sequences, in no particular order."""
        for sequences in self._sequences.values():
            yield from sequences

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._sequences.get(adapter_of(seq), ())

    def __len__(self) -> int:
        """Return the number of adapters that are waited for."""
        return len(self._sequences)

    def add(self, seq: Sequence, key: Key) -> None:
        """Let a sequence wait."""
        self._keys[seq] = key
        self._sequences.setdefault(adapter_of(seq), Heap()).set(seq, key)
        self._sort(adapter_of(seq))

    def first_of(self, digest: str) -> Sequence | None:
        """Return the first sequence that waits for an adapter, None if there is none."""
        waiting = self._sequences.get(digest)
        return None if waiting is None else waiting.first()

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence that waits."""
        digest = adapter_of(seq)
        del self._keys[seq]
        self._sequences[digest].remove(seq)
        if not len(self._sequences[digest]):
            del self._sequences[digest]
        self._sort(digest)

    def firsts(self) -> Iterator[Sequence]:
        """Yield the first sequence of each adapter, in order. Nothing may change meanwhile.

        The cost is O(log n) for each that is taken.
        """
        yield from (self._sequences[digest].first() for digest in self._adapters.in_order())

    def _sort(self, digest: str) -> None:
        first = self.first_of(digest)
        if first is not None:
            self._adapters.set(digest, self._keys[first])
        elif digest in self._adapters:
            self._adapters.remove(digest)


class AdapterHook(AdmissionHook):
    """Holds back sequences whose adapter can have no slot now.

    Invariants, verified by tests/lora/fake_adapters.py:
    - A running sequence's adapter has the slot that its `AdapterSlot` names, and is pinned there.
    - A sequence in the waiting room waits: the policy does not hold it, and it has no table row.

    **No head blocks the others.** A sequence whose turn has come while all slots are pinned goes to
    the waiting room, and the queue goes on. It keeps its turn. When a slot can be had, the first
    that waits comes back to the queue. Others of its adapter follow one by one, each when the one
    before it is admitted, so a step's cost does not depend on how many wait.

    **Within an adapter** the policy's order holds: a later sequence does not pass an earlier one.

    **No adapter starves another.** The first sequence of each adapter that waits claims a slot: the
    least recently used one that is pinned and not claimed. The adapter that has it gets only
    sequences that come before the claimant in the policy's order. So its running ones end, and the
    slot is free after at most the time that these take.
    """

    def __init__(self, max_loras: int) -> None:
        self.slots = SlotTable(max_loras)
        self._room = WaitingRoom()
        self._keys: dict[Sequence, Key] = {}  # of those that waited here and were not admitted yet
        self._claims: dict[str, Sequence] = {}  # the claimant, by adapter that has the slot
        self._recalled: dict[str, Sequence] = {}  # back in the queue, by adapter; one for each
        self._place: SlotChoice | None = None  # of the adapter that is being admitted

    def begin_step(self) -> None:
        """Let those that can have a slot come back, and claim slots for others."""
        if len(self._room):
            self._recall()
            self._claim()

    def holds(self, seq: Sequence) -> bool:
        """Let a sequence whose turn has come wait in the room, if it can have no slot, or if an
        earlier one of its adapter waits there.
        """
        if seq.adapter is None:
            return False
        key = self._key_of(seq)
        earlier = self._room.first_of(seq.adapter.digest)
        if self._may_go(seq) and (earlier is None or key < self._keys[earlier]):
            return False
        self._set_aside(seq, key)
        return True

    def prepare(self, seq: Sequence, hit: Hit) -> Hit:
        if seq.adapter is not None:
            self._place = self.slots.find(seq.adapter.digest)
            assert self._place is not None  # `holds` saw to it
            seq.adapter = seq.adapter._replace(slot=self._place.slot)
        return hit

    def admitted(self, seq: Sequence, hit: Hit) -> None:
        if seq.adapter is None:
            return
        digest = seq.adapter.digest
        place = self._place
        assert place is not None
        self._forget_recalled(seq)
        self._keys.pop(seq, None)
        claims = self._claims.items()
        claimed = [holder for holder, claimant in claims if adapter_of(claimant) == digest]
        for holder in claimed:
            del self._claims[holder]
        if place.evicted is not None:
            self._claims.pop(place.evicted, None)
        self.slots.take(digest, place)
        for holder in (digest, *claimed):  # now, for later ones may come in this step
            if holder in self.slots.slots:
                self._recall_next(holder)

    def release(self, seq: Sequence) -> None:
        if seq.adapter is not None:
            self.slots.let_go(seq.adapter.digest)

    def remove(self, seq: Sequence) -> None:
        if seq.adapter is None:
            return
        if seq in self._room:
            self._room.remove(seq)
        self._forget_recalled(seq)
        self._keys.pop(seq, None)
        self._claims = {
            holder: claimant for holder, claimant in self._claims.items() if claimant is not seq
        }

    def _key_of(self, seq: Sequence) -> Key:
        """Return the place in the policy's order of a sequence whose turn has come once."""
        key = self._keys.get(seq)
        return self.scheduler.policy.order(seq) if key is None else key

    def _may_go(self, seq: Sequence) -> bool:
        """Return whether a sequence can have a slot now that is claimed by none before it."""
        digest = adapter_of(seq)
        claimant = self._claims.get(digest)
        if digest in self.slots.slots:
            return claimant is None or self._key_of(seq) < self._key_of(claimant)
        return self.slots.find(digest) is not None

    def _recall(self) -> None:
        """Let those back into the queue that can have a slot: one of each adapter, the first."""
        for seq in list(self._recalled.values()):
            first = self._room.first_of(adapter_of(seq))
            if seq.is_queued and first is not None and self._keys[first] < self._keys[seq]:
                self._set_aside(seq, self._keys[seq])
        for digest in list(self.slots.slots):
            self._recall_next(digest)
        recalled = [seq for digest, seq in self._recalled.items() if digest not in self.slots.slots]
        before = sorted(self._keys[seq] for seq in recalled)
        num_left = self.slots.num_available
        for seq in self._without_slot(num_left):
            if bisect(before, self._keys[seq]) < num_left:
                num_left -= 1
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
        """Return the first sequences that wait of adapters without a slot, in order."""
        firsts = (
            seq
            for seq in self._room.firsts()
            if adapter_of(seq) not in self.slots.slots
            and adapter_of(seq) not in self._recalled
            and adapter_of(seq) not in but
        )
        return list(islice(firsts, max(0, most)))

    def _set_aside(self, seq: Sequence, key: Key) -> None:
        """Let a sequence that the policy holds wait in the room."""
        self._keys[seq] = key
        self.scheduler.suspend(seq)
        self._forget_recalled(seq)
        self._room.add(seq, key)

    def _bring_back(self, seq: Sequence) -> None:
        self._room.remove(seq)
        self._recalled[adapter_of(seq)] = seq
        self.scheduler.resume(seq)

    def _forget_recalled(self, seq: Sequence) -> None:
        if self._recalled.get(adapter_of(seq)) is seq:
            del self._recalled[adapter_of(seq)]
