"""Sequences that wait for a slot of their adapter, outside the queue of prompts.

Owns their order. Knows no slots.
"""

from collections.abc import Iterator

from nanovllm.scheduler.heap import Heap
from nanovllm.scheduler.sequence import Sequence

Key = tuple[int, int, int]
"""Sorts waiting sequences as their queue does: priority, turn, arrival."""


def key_of(seq: Sequence) -> Key:
    """Return the place of a sequence whose turn has come once."""
    return (seq.priority, seq.turn, seq.seq_id)


def adapter_of(seq: Sequence) -> str:
    """Return the digest of a sequence's adapter; it has one."""
    assert seq.adapter is not None
    return seq.adapter.digest


class WaitingRoom:
    """Waiting sequences by adapter. Each operation costs amortised O(log n)."""

    def __init__(self) -> None:
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

    def add(self, seq: Sequence) -> None:
        """Let a sequence wait."""
        self._sequences.setdefault(adapter_of(seq), Heap()).set(seq, key_of(seq))
        self._sort(adapter_of(seq))

    def first_of(self, digest: str) -> Sequence | None:
        """Return the first sequence that waits for an adapter, None if there is none."""
        waiting = self._sequences.get(digest)
        return None if waiting is None else waiting.first()

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence that waits."""
        digest = adapter_of(seq)
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
            self._adapters.set(digest, key_of(first))
        elif digest in self._adapters:
            self._adapters.remove(digest)
