"""The default policy: lower priority values go first, and within a priority users take turns."""

from nanovllm.core.sequence import Sequence
from nanovllm.scheduler.heap import Heap
from nanovllm.scheduler.policy import Policy


class FairPolicy(Policy):
    """Deficit round robin over users (Shreedhar and Varghese, 1995) within each priority.

    In each round every user that waits saves one token. A user's next sequence goes when the user
    has saved its cost: `max_num_tokens`, the most tokens that it may have. That round is the
    sequence's `turn`. Within a user, earlier arrivals go first. A user whose last sequence leaves
    the queue loses what it has saved.

    A sequence keeps its place until its prompt is computed, and rounds pass with the prompt's
    tokens. So a user who comes while a long prompt runs may have the earlier turn.

    A sequence of a user waits for at most C + M tokens of each other user of its priority: C is
    the cost of what its own user admits from its arrival on, itself included, and M the cost of the
    other user's largest sequence. How many sequences the other user has does not matter.

    A preempted sequence was paid for: it comes back with the turn that it had.

    Each operation costs amortised O(log n). Rounds in which no user could go are skipped.
    """

    def __init__(self) -> None:
        self._levels: dict[int, _RoundRobin] = {}  # by priority; none is empty
        self._priorities: Heap[int] = Heap()
        self._round = 0  # no turn was later in a level that is gone

    def order(self, seq: Sequence) -> tuple[int, bool, int, int]:
        """Return priority, whether its prompt is to be computed, the user's turn, then arrival.

        Arrival alone would make a user who came late the victim of each preemption, until all that
        another user sent before is done.
        """
        return (seq.priority, seq.is_queued, seq.turn, seq.seq_id)

    def push(self, seq: Sequence) -> None:
        """Add a sequence, a new one or one that was preempted, unless it still has its place."""
        if seq.priority not in self._levels:
            self._levels[seq.priority] = _RoundRobin(self._round)
            self._priorities.set(seq.priority, (seq.priority,))
        self._levels[seq.priority].push(seq)

    def first(self) -> Sequence | None:
        """Return the sequence whose prompt comes next, None if there is none."""
        return self._levels[self._priorities.first()].first() if self._levels else None

    def advance(self, seq: Sequence, num_left: int) -> None:
        """Let the user pay at the first call, after which the sequence keeps its turn for good.
        Until it is removed it stays first of its user, though it runs.
        """
        self._levels[seq.priority].advance(seq, num_left)

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence."""
        level = self._levels[seq.priority]
        level.remove(seq)
        if level.is_empty:
            del self._levels[seq.priority]
            self._priorities.remove(seq.priority)
            self._round = max(self._round, level.round)


class _RoundRobin:
    """The sequences of one priority.

    Args:
        start: the round of the first users that come.
    """

    def __init__(self, start: int) -> None:
        self.round = start  # that has passed
        self._users: dict[str, _User] = {}  # those with sequences
        self._turns: Heap[str] = Heap()

    @property
    def is_empty(self) -> bool:
        return not self._users

    def push(self, seq: Sequence) -> None:
        user = self._users.get(seq.user)
        if user is None:
            user = self._users[seq.user] = _User(self.round)
        user.sequences.set(seq, (seq.seq_id,))
        self._turns.set(seq.user, user.next_turn())

    def first(self) -> Sequence:
        return self._users[self._turns.first()].sequences.first()

    def advance(self, seq: Sequence, num_left: int) -> None:
        user = self._users[seq.user]
        seq.has_turn = True
        user.start = max(user.start, seq.turn)
        self.round = max(self.round, seq.turn - num_left)

    def remove(self, seq: Sequence) -> None:
        user = self._users[seq.user]
        user.sequences.remove(seq)
        if len(user.sequences):
            self._turns.set(seq.user, user.next_turn())
        else:
            del self._users[seq.user]
            self._turns.remove(seq.user)


class _User:
    """A user's sequences, and the round from which it saves for the first of them."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.sequences: Heap[Sequence] = Heap()

    def next_turn(self) -> tuple[int, int]:
        """Return the sort key of the user: the turn of its first sequence, then its arrival."""
        seq = self.sequences.first()
        if not seq.has_turn:
            seq.turn = self.start + seq.max_num_tokens
        return (seq.turn, seq.seq_id)
