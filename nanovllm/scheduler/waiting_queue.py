"""The waiting sequences: lower priority values go first, and within a priority users take turns.

Owns the order of admission. Knows no blocks, no steps and no tokens' values.
"""

import heapq
from collections.abc import Iterator
from itertools import count
from typing import Generic, TypeVar

from nanovllm.scheduler.sequence import Sequence

Item = TypeVar("Item")


class WaitingQueue:
    """Deficit round robin over users (Shreedhar and Varghese, 1995) within each priority.

    In each round every user that waits saves one token. A user's next sequence goes when the user
    has saved its cost: `max_num_tokens`, the most tokens that it may have. Within a user, earlier
    arrivals go first. A user whose last sequence leaves the queue loses what it has saved.

    So a sequence of a user waits for at most C + M tokens of each other user of its priority: C is
    the cost of what its own user admits from its arrival on, itself included, and M the cost of the
    other user's largest sequence. How many sequences the other user has does not matter.

    A preempted sequence was paid for. It goes before all sequences that were never admitted, except
    earlier arrivals of its own user.

    Each operation costs amortised O(log n). Rounds in which nobody could go are skipped.
    """

    def __init__(self) -> None:
        self._levels: dict[int, _RoundRobin] = {}  # by priority; none is empty
        self._priorities: _Heap[int] = _Heap()
        self._turn = 0
        self._last_user: str | None = None

    def __iter__(self) -> Iterator[Sequence]:
        """Yield all waiting sequences, in no particular order."""
        for level in self._levels.values():
            yield from level

    def push(self, seq: Sequence) -> None:
        """Add a sequence: a new one, or one that was preempted."""
        if seq.priority not in self._levels:
            self._levels[seq.priority] = _RoundRobin()
            self._priorities.set(seq.priority, (seq.priority,))
        self._levels[seq.priority].push(seq)

    def first(self) -> Sequence | None:
        """Return the sequence to admit next, None if none waits."""
        return self._levels[self._priorities.first()].first() if self._levels else None

    def pop(self) -> Sequence:
        """Remove and return the first sequence. Its user pays for it, if it was never admitted."""
        level = self._levels[self._priorities.first()]
        seq = level.first()
        if not seq.was_admitted:
            self._turn += self._last_user not in (None, seq.user)
            self._last_user = seq.user
            seq.turn = self._turn
            level.pay(seq)
        self.remove(seq)
        return seq

    def remove(self, seq: Sequence) -> None:
        """Remove a waiting sequence."""
        level = self._levels[seq.priority]
        level.remove(seq)
        if level.is_empty:
            del self._levels[seq.priority]
            self._priorities.remove(seq.priority)


class _RoundRobin:
    """The sequences of one priority."""

    def __init__(self) -> None:
        self.round = 0  # in which the last sequence went
        self._users: dict[str, _User] = {}  # those with sequences
        self._turns: _Heap[str] = _Heap()
        self._numbers = count()

    def __iter__(self) -> Iterator[Sequence]:
        for user in self._users.values():
            yield from user.sequences

    @property
    def is_empty(self) -> bool:
        return not self._users

    def push(self, seq: Sequence) -> None:
        user = self._users.get(seq.user)
        if user is None:
            user = self._users[seq.user] = _User(self.round, next(self._numbers))
        user.sequences.set(seq, (seq.seq_id,))
        self._turns.set(seq.user, user.turn)

    def first(self) -> Sequence:
        return self._users[self._turns.first()].sequences.first()

    def pay(self, seq: Sequence) -> None:
        user = self._users[seq.user]
        user.start += seq.max_num_tokens
        self.round = max(self.round, user.start)

    def remove(self, seq: Sequence) -> None:
        user = self._users[seq.user]
        user.sequences.remove(seq)
        if len(user.sequences):
            self._turns.set(seq.user, user.turn)
        else:
            del self._users[seq.user]
            self._turns.remove(seq.user)


class _User:
    """A user's sequences, and the round from which it saves for the first of them.

    Args:
        number: breaks ties between users: the one that began to wait earlier goes first.
    """

    def __init__(self, start: int, number: int) -> None:
        self.start = start
        self.number = number
        self.sequences: _Heap[Sequence] = _Heap()

    @property
    def turn(self) -> tuple[int, ...]:
        """Sort key: users with a preempted sequence first, then by the round of their turn."""
        seq = self.sequences.first()
        if seq.was_admitted:
            return (0, seq.turn, seq.seq_id)
        return (1, self.start + seq.max_num_tokens, self.number)


class _Heap(Generic[Item]):
    """Items by key, the lowest first. Any item can be removed, and its key changed.

    Entries of old keys stay in the heap until they come first, or until they are most of it.
    """

    def __init__(self) -> None:
        self._keys: dict[Item, tuple[int, ...]] = {}
        self._entries: list[tuple[tuple[int, ...], Item]] = []  # heap

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._keys)

    def set(self, item: Item, key: tuple[int, ...]) -> None:
        """Add an item, or change its key. Items must differ in their keys or be comparable."""
        if self._keys.get(item) != key:
            self._keys[item] = key
            heapq.heappush(self._entries, (key, item))
            self._drop_old_entries()

    def first(self) -> Item:
        """Return the item with the lowest key; there must be one."""
        while self._keys.get(self._entries[0][1]) != self._entries[0][0]:
            heapq.heappop(self._entries)
        return self._entries[0][1]

    def remove(self, item: Item) -> None:
        del self._keys[item]
        self._drop_old_entries()

    def _drop_old_entries(self) -> None:
        if len(self._entries) > 2 * len(self._keys) + 16:
            self._entries = [(key, item) for item, key in self._keys.items()]
            heapq.heapify(self._entries)
