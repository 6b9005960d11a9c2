"""What a draft network costs: measured at start, then corrected by real steps."""

from collections import deque
from collections.abc import Sequence
from math import log

from nanovllm.features.speculation.cost_curve import CostCurve


class DraftCosts:
    """Seconds of proposing. Rows go forward together: each pass gives a token to each row.

    Args:
        measured: (rows, seconds of each row's first draft, of each further one), ascending; empty
            if proposing costs nothing.
    """

    def __init__(self, measured: Sequence[tuple[int, float, float]]) -> None:
        self.is_free = not measured
        self._first = CostCurve([(size, first) for size, first, _ in measured])
        self._later = CostCurve([(size, later) for size, _, later in measured])
        # (rows, draft tokens, expected seconds) of the last steps that propose
        self._plans: deque[tuple[int, int, float]] = deque(maxlen=4)

    def by_rows(self, num_rows: int) -> tuple[list[float], list[float]]:
        """Return the seconds of a first pass with 0 to `num_rows` rows, and of a further pass."""
        if self.is_free:
            nothing = [0.0] * (num_rows + 1)
            return nothing, nothing
        first, later = (
            [0.0, *map(costs.at, range(1, num_rows + 1))] for costs in (self._first, self._later)
        )
        return first, later

    def of_another_row(self, num_rows: int) -> float:
        """Return what one draft of one more row adds to a pass of `num_rows` rows."""
        if self.is_free:
            return 0.0
        return self._first.at(num_rows + 1) - (self._first.at(num_rows) if num_rows else 0.0)

    def plan(self, choice: list[int]) -> None:
        """Note that a step will propose so many drafts for each of its rows."""
        if self.is_free or not any(choice):
            return
        first, later = self.by_rows(len(choice))
        counts = [sum(k >= depth for k in choice) for depth in range(1, max(choice) + 1)]
        seconds = first[counts[0]] + sum(later[count] for count in counts[1:])
        self._plans.append((counts[0], sum(choice), seconds))

    def observe(self, num_rows: int, num_tokens: int, seconds: float) -> float:
        """Learn from a step that proposed; return its seconds beyond those of its plan."""
        if self.is_free or seconds <= 0:
            return 0.0
        for plan in self._plans:
            if plan[:2] == (num_rows, num_tokens):
                self._plans.remove(plan)
                for costs in (self._first, self._later):
                    costs.rescale(log(seconds / plan[2]))
                return max(seconds - plan[2], 0.0)
        return 0.0
