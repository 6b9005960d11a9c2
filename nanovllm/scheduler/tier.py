"""What the scheduler knows of a tier: which entries it has, and what a page of it costs.

A tier keeps copies of entries of the prefix cache below the pool. Host memory is one
(host_slots.py), a byte store another (here). Knows no tensors and no bytes of an entry.
"""

from collections.abc import Callable, Sequence as Seq
from typing import Protocol

from nanovllm.scheduler.transfers import STORE, Part


class Tier(Protocol):
    """Copies of entries, by key. The workers move their contents."""

    name: str
    """`Part.tier`."""
    page_seconds: float
    """Expected seconds to load a page; 0.0 while nothing is known."""

    def find(self, key: bytes) -> bool:
        """Return whether the tier has an entry."""
        ...

    def offer(self, key: bytes, pages: Seq[int]) -> Part | None:
        """Return how an entry gets into the tier; None if it is there, or if there is no room.

        Args:
            pages: of the pool, which hold the entry.
        """
        ...

    def begin(self, key: bytes) -> Part:
        """Return how an entry that was found is loaded, without its pages. Until `end` it stays."""
        ...

    def end(self, part: Part) -> None:
        """Note that a load of an entry is over."""
        ...

    def forget(self, key: bytes) -> None:
        """Find an entry no more, unless it is offered again."""
        ...


class StoreTier:
    """A byte store, see nanovllm/tiers. It evicts what it likes, so a load from it may fail.

    Args:
        has: whether the store has an entry. Cheap: it is called for each block of a prompt.
    """

    name = STORE

    def __init__(self, has: Callable[[bytes], bool]) -> None:
        self.page_seconds = 0.0
        self._has = has
        self._forgotten: set[bytes] = set()  # damaged entries, until they are written again

    def find(self, key: bytes) -> bool:
        return key not in self._forgotten and self._has(key)

    def offer(self, key: bytes, pages: Seq[int]) -> Part | None:
        if self.find(key):
            return None
        self._forgotten.discard(key)
        return Part(self.name, key, list(pages), [])

    def begin(self, key: bytes) -> Part:
        return Part(self.name, key, [], [])

    def end(self, part: Part) -> None:
        pass

    def forget(self, key: bytes) -> None:
        self._forgotten.add(key)
