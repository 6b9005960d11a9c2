"""A controller of drafts under test: it allows what a function says. Imports no torch."""

import random
from collections.abc import Callable, Sequence as Seq

from nanovllm.features.speculation.draft_controller import Acceptance, DraftController
from nanovllm.outputs import DraftCounts


class FakeController(DraftController):
    """Allows each row what `allow` returns for the most that it could take."""

    def __init__(self, allow: Callable[[int], int]) -> None:
        self._allow = allow
        self.counts = DraftCounts()
        self.num_step_tokens: list[int] = []  # computed by each step, drafts included
        self.num_step_drafts: list[tuple[int, int]] = []  # of each step: rows with drafts, drafts

    def choose(self, candidates: Seq[tuple[Acceptance, int]], num_tokens: int) -> list[int]:
        assert num_tokens >= len(candidates)
        assert all(limit >= 0 for _, limit in candidates)
        return [self._allow(limit) for _, limit in candidates]

    def skips_step(self) -> bool:
        return False

    def add_host_seconds(self, seconds: float) -> None:
        assert seconds >= 0

    def record(
        self, acceptance: Acceptance, num_allowed: int, num_proposed: int, num_accepted: int
    ) -> None:
        assert 0 <= num_accepted <= num_proposed <= num_allowed
        assert num_allowed > 0
        self.counts.add(num_proposed, num_accepted)

    def record_step(
        self,
        num_tokens: int,
        seconds: float,
        num_draft_rows: int,
        num_draft_tokens: int,
        draft_seconds: float,
    ) -> None:
        self.num_step_tokens.append(num_tokens)
        self.num_step_drafts.append((num_draft_rows, num_draft_tokens))


def random_limits(seed: int) -> FakeController:
    """Return a controller of random limits, often the highest and often 0."""
    rng = random.Random(seed)
    return FakeController(lambda most: rng.choice([0, most, rng.randint(0, most)]))
