"""Sequences that wait for a slot of their adapter, outside the scheduler's queue."""

from collections.abc import Iterator
from typing import Any

from nanovllm.core.sequence import Sequence
from nanovllm.scheduler.heap import Heap

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
