"""What the scheduler knows about a tier: which entries it has, and what moving a page costs.

A tier keeps copies of entries of the prefix cache below the pool. Host memory is one, a byte store
another.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence as Seq

from nanovllm.core.messages import HOST, STORE, TierEntry

_MAX_FORGOTTEN = 4096  # keys of failed loads that a `StoreTier` knows: half a megabyte


class ByteStore(ABC):
    """Keeps entries of the prefix cache as bytes.

    A store of the user's is called with `namespace`, which differs if anything differs that decides
    what the bytes are, and `rank`: entries of other namespaces and ranks must not be found. Each
    rank has a store, and the engine has one of rank 0, which it only asks.

    One thread may write while others read. An entry that cannot be had is a miss.
    """

    @abstractmethod
    def has(self, key: bytes) -> bool:
        """Return whether there is an entry. It is asked for each block of a prompt: it must be
        fast. `read` may find no such entry nevertheless.
        """

    @abstractmethod
    def read(self, key: bytes, buffers: Seq[memoryview]) -> bool:
        """Fill `buffers`, one a page, of uint8, with the entry's bytes in their order. Return False
        if the entry is missing, damaged or of another size: it is computed then.
        """

    @abstractmethod
    def write(self, key: bytes, buffers: Seq[memoryview]) -> None:
        """Keep an entry, if there is room. The buffers' memory is used again after the call."""

    def close(self) -> None:  # noqa: B027
        """Let the store go. Entries stay."""


@dataclasses.dataclass(slots=True, eq=False)
class _Entry:
    slots: list[int]
    num_pins: int = 0  # loads that read it


class HostSlots:
    """The host memory tier: entries of one or more pages, the least recently used evicted first.

    The workers have as many slots, each for one page. `page_seconds` is how long loading a page is
    expected to take; 0.0 while nothing is known.

    Invariants, verified by tests/tiers/invariants.py:
    - A slot is free, or belongs to one entry.
    - An entry that is being loaded is pinned: its slots are not reused.

    An entry that was loaded stays here: the next eviction of it from the pool copies nothing. Every
    operation costs O(slots that it touches).
    """

    name = HOST

    def __init__(self, num_slots: int, page_seconds: float = 0.0) -> None:
        self.num_slots = num_slots
        self.page_seconds = page_seconds
        self._free = list(reversed(range(num_slots)))  # low ones first: touched memory is taken
        self._entries: dict[bytes, _Entry] = {}
        self._unpinned: OrderedDict[bytes, None] = OrderedDict()  # LRU order
        self._pinned: dict[int, _Entry] = {}  # by their first slot; forgotten ones, too

    def find(self, key: bytes) -> bool:
        """Return whether the tier has an entry."""
        return key in self._entries

    def offer(self, key: bytes, pages: Seq[int]) -> TierEntry | None:
        """Return how an entry, which is in these pages, gets into the tier; None if it is there, or
        if too many slots are pinned.
        """
        if key in self._entries:
            if key in self._unpinned:
                self._unpinned.move_to_end(key)
            return None
        if len(pages) > self.num_slots:
            return None
        while len(self._free) < len(pages) and self._unpinned:
            self.forget(next(iter(self._unpinned)))
        if len(self._free) < len(pages):
            return None
        slots = [self._free.pop() for _ in pages]
        self._entries[key] = _Entry(slots)
        self._unpinned[key] = None
        return TierEntry(self.name, key, list(pages), slots)

    def begin(self, key: bytes) -> TierEntry:
        """Return how an entry that was found is loaded, without its pages. Until `end` it stays."""
        entry = self._entries[key]
        entry.num_pins += 1
        self._pinned[entry.slots[0]] = entry
        self._unpinned.pop(key, None)
        return TierEntry(self.name, key, [], list(entry.slots))

    def end(self, part: TierEntry) -> None:
        """Note that a load of an entry is over."""
        entry = self._pinned[part.slots[0]]
        entry.num_pins -= 1
        if entry.num_pins == 0:
            del self._pinned[part.slots[0]]
            if self._entries.get(part.key) is entry:
                self._unpinned[part.key] = None
            else:
                self._free += entry.slots

    def forget(self, key: bytes) -> None:
        """Find an entry no more, unless it is offered again."""
        entry = self._entries.pop(key, None)
        if entry is not None and entry.num_pins == 0:
            del self._unpinned[key]
            self._free += entry.slots

    def clear(self) -> None:
        """Forget all entries."""
        for key in list(self._entries):
            self.forget(key)


class StoreTier:
    """The tier of a `ByteStore`, with the methods of `HostSlots`. The store evicts what it likes,
    so a load may fail.

    An entry whose load failed is not found until it is written again. Only the last
    `_MAX_FORGOTTEN` are known: an earlier one may be found, and its load fail once more.
    """

    name = STORE

    def __init__(self, has: Callable[[bytes], bool]) -> None:
        self.page_seconds = 0.0
        self._has = has
        self._forgotten: OrderedDict[bytes, None] = OrderedDict()  # the latest last

    def find(self, key: bytes) -> bool:
        return key not in self._forgotten and self._has(key)

    def offer(self, key: bytes, pages: Seq[int]) -> TierEntry | None:
        if self.find(key):
            return None
        self._forgotten.pop(key, None)
        return TierEntry(self.name, key, list(pages), [])

    def begin(self, key: bytes) -> TierEntry:
        return TierEntry(self.name, key, [], [])

    def end(self, part: TierEntry) -> None:
        pass

    def forget(self, key: bytes) -> None:
        self._forgotten[key] = None
        if len(self._forgotten) > _MAX_FORGOTTEN:
            self._forgotten.popitem(last=False)


Tier = HostSlots | StoreTier
