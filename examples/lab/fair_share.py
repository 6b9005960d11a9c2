"""A policy in one file: users share the engine by the tokens that their requests really took.

The default lets users take turns by what a request may take, its `max_tokens`: it must know that at
the start. Who asks for up to 4096 tokens and gets 20 then waits as if it got 4096. Here a user pays
that at the start, too, and gets back what was not used when the request ends.

    nanovllm lab check examples.lab.fair_share:FairShare --fair
"""

from nanovllm.core.sequence import Sequence
from nanovllm.scheduler.heap import Heap
from nanovllm.scheduler.policy import Policy

Key = tuple[int, int, int]


class FairShare(Policy):
    """By priority; then start-time fair queueing over users (Goyal, Vin and Cheng, 1996).

    A request starts when its user has paid for the one before. Time is counted in tokens: it is the
    start of the last request that went.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, Heap[Sequence]] = {}  # by user; none is empty
        self._users: Heap[str] = Heap()
        self._keys: dict[Sequence, Key] = {}  # (priority, start, arrival) of those that have one
        self._paid: dict[str, int] = {}  # by user: until when
        self._now = 0

    def order(self, seq: Sequence) -> Key:
        return self._keys[seq]

    def push(self, seq: Sequence) -> None:
        self._waiting.setdefault(seq.user, Heap()).set(seq, (seq.priority, seq.seq_id))
        self._rank(seq.user)

    def remove(self, seq: Sequence) -> None:
        if seq in self._keys:
            self._now = max(self._now, self._keys[seq][1])
        self._waiting[seq.user].remove(seq)
        if len(self._waiting[seq.user]):
            self._rank(seq.user)
        else:
            del self._waiting[seq.user]
            self._users.remove(seq.user)

    def first(self) -> Sequence | None:
        return self._waiting[self._users.first()].first() if self._waiting else None

    def end(self, seq: Sequence) -> None:
        if self._keys.pop(seq, None) is not None:
            used = len(seq.token_ids) if seq.was_admitted else 0
            self._paid[seq.user] -= seq.max_num_tokens - used
        if not self._keys:
            self._paid.clear()

    def _rank(self, user: str) -> None:
        """Give the user the place of its first request, which keeps its start for good."""
        seq = self._waiting[user].first()
        if seq not in self._keys:
            start = max(self._now, self._paid.get(user, 0))
            self._keys[seq] = (seq.priority, start, seq.seq_id)
            self._paid[user] = start + seq.max_num_tokens
        self._users.set(user, self._keys[seq])
