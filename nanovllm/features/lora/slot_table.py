"""Which adapters have a slot, and which of them running sequences use.

The scheduler's side: the workers load what an admission names into the slot that it names.
"""

from collections import OrderedDict
from typing import NamedTuple


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
