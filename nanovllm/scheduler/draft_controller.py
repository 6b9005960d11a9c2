"""Decides how many draft tokens each row may get. Knows no tokens, no tensors and no clock."""

from collections.abc import Sequence as Seq


class Acceptance:
    """How one request's drafts fare."""

    __slots__ = ()


class DraftController:
    """Allows every row as many drafts as it can take."""

    def __init__(
        self,
        max_draft_tokens: int,
        step_seconds: Seq[tuple[int, float]],
        draft_seconds: Seq[tuple[int, float]],
    ) -> None:
        self.max_draft_tokens = max_draft_tokens

    def choose(self, candidates: Seq[tuple[Acceptance, int]], num_tokens: int) -> list[int]:
        """Return how many drafts each of `candidates` may get."""
        return [min(limit, self.max_draft_tokens) for _, limit in candidates]

    def record(
        self, acceptance: Acceptance, num_allowed: int, num_proposed: int, num_accepted: int
    ) -> None:
        """Take the result of one row."""

    def record_step(
        self,
        num_tokens: int,
        seconds: float,
        num_draft_rows: int,
        num_draft_tokens: int,
        draft_seconds: float,
    ) -> None:
        """Take the durations of one step."""
