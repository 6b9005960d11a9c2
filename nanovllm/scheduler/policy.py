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
        """Return the sort key of a sequence; lower ones go first, and no two are equal.

        It is asked of running sequences, and of the one that is `first`. From then on it must not
        change, except when the sequence is pushed or removed: `Sequence.is_queued` says whether
        the policy holds it.
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
        """Return the sequence that loses its KV, because the first candidate needs a page.

        Args:
            candidates: the sequence that needs the page, and the running ones after it in order.
                None has a row in this step. If the first is the victim itself it gets none.
        """
        return candidates[-1]

    def share(self, seq: Sequence, num_missing: int, budget: int) -> int:
        """Return how many tokens of a sequence the step computes.

        Args:
            num_missing: tokens that it could compute; at least 2: a single one is always computed.
            budget: tokens that the step has left, at least 1.

        Returns:
            At least 1, and at most `num_missing` and `budget`.
        """
        return min(num_missing, budget)
