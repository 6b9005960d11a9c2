"""The base class of scheduling policies: which sequences go first."""

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from typing import Any

from nanovllm.core.sequence import Sequence


class Policy(ABC):
    """Orders sequences: who waits before whom, who loses its KV, who gets how much of a step.

    Only the scheduler calls it. Its queue holds the prompts to compute: waiting sequences, and
    running ones whose prompt is not computed. Each operation should cost O(log n).
    It reads sequences and changes none of them, except fields that it owns.

    A step goes through running and waiting sequences by `order`. It looks only at the first
    waiting one: admission stops at the first that does not fit.
    """

    @abstractmethod
    def order(self, seq: Sequence) -> Any:
        """Return the sort key of a sequence that runs or is `first`; lower ones go first, and no
        two are equal. It changes only when the sequence is pushed or removed: see
        `Sequence.is_queued`.
        """

    @abstractmethod
    def push(self, seq: Sequence) -> None:
        """Queue a sequence: new, preempted, or removed before."""

    @abstractmethod
    def remove(self, seq: Sequence) -> None:
        """Remove any queued sequence: its prompt is computed, it has ended, or it must wait
        elsewhere until it is pushed again.
        """

    @abstractmethod
    def first(self) -> Sequence | None:
        """Return the first queued sequence, or None."""

    def advance(self, seq: Sequence, num_left: int) -> None:  # noqa: B027
        """Note that all but `num_left` tokens of a queued sequence's prompt are computed.

        At 0 it is removed next. A sequence that must wait elsewhere advances as if all were.
        """

    def end(self, seq: Sequence) -> None:  # noqa: B027
        """Note that a sequence has ended; if it was queued, it was removed first. Called once."""

    def victim(self, candidates: Seq[Sequence]) -> Sequence:
        """Return the sequence that loses its KV, because the first candidate needs a page. The
        others are the running ones after it in order; none of all has a row in this step.
        """
        return candidates[-1]

    def share(self, seq: Sequence, num_missing: int, budget: int) -> int:
        """Return how many tokens of a sequence the step computes: at least 1, and at most
        `num_missing`, of which there are 2 at least, and the `budget` that the step has left.
        """
        return min(num_missing, budget)
