"""What steps and draft networks cost, by tokens or rows: measured at start, then corrected by real
steps.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import exp, log

_LONGEST_INTERVAL = 128
"""Steps after which a size counts as unobserved."""
_MAX_ADDED = 32
"""Number of sizes that may be added to the measured ones."""

# Variances of natural logarithms: 0.01 stands for about 10%.
_SCALE_DOUBT = 0.25
"""Of the scale before the first step: measured steps are of one sequence, real ones of many."""
_UNKNOWN_SCALE = 0.01
"""Of a scale of which too little is known to choose drafts by it, as in the first two steps."""
_SCALE_DRIFT = 1e-4
"""What each step adds to that doubt: contexts grow, other processes come and go."""
_MEASURED_DOUBT = 0.04
"""Of a size that was measured at start."""
_BETWEEN_DOUBT = 0.09
"""Of a size between measured ones, where a stair may be."""
_BEYOND_DOUBT = 0.5
"""Of a size beyond the measured ones, where the last slope may be wrong."""
_NOISE = 0.0025
"""Of the seconds of one step."""
_LEAST_CHANGE = 1e-3
"""Correction from which other sizes follow."""
_SURPRISE = 0.1
"""Deviation, beyond the one agreed on, from which a step leaves the doubts as they are."""


@dataclass(slots=True)
class _Size:
    """What is known of one size: its logarithmic seconds, without the common scale."""

    tokens: int
    start: float
    seconds: float
    doubt: float
    is_added: bool = False
    num_seen: int = 0
    last_seen: int = 0
    deviation: float = 0.0  # of the last observation


class CostCurve:
    """Seconds by size: measured at start, interpolated, and corrected by what is observed.

    All sizes have a common scale, and each size has its own correction. An observation moves
    both, each by its share of the doubt (a Kalman filter of two independent states, Kalman 1960).
    So the first steps move the scale. Once the scale is known, what deviates is the size. If a
    size is cheaper than it was measured, sizes near it that were not observed follow.

    Both move only as far as two observations in a row agree on, so that a single slow step changes
    nothing. The correction of a size that is not observed any more is slowly forgotten. An observed
    size between measured ones, or beyond them, is added: there may be a stair.

    Without measurements the cost is taken as proportional to the size, so no draft ever pays.
    """

    def __init__(self, measured: Sequence[tuple[int, float]]) -> None:
        measured = measured or ((1, 1.0),)
        logs = [log(max(seconds, 1e-9)) for _, seconds in measured]
        self._sizes = [
            _Size(size, start, start, _MEASURED_DOUBT)
            for (size, _), start in zip(measured, logs, strict=True)
        ]
        self._largest_measured = measured[-1][0]
        self._scale = 0.0
        self._scale_doubt = _SCALE_DOUBT
        self._deviation = 0.0  # of the last observation, whatever its size
        self._num_observed = 0
        self._rebuild()

    def at(self, size: float) -> float:
        """Return the expected seconds; beyond the largest known size at least proportional ones."""
        i = max(bisect_right(self.sizes, size) - 1, 0)
        return self._seconds[i] + self._slopes[i] * max(size - self.sizes[i], 0)

    def least_slope(self, size: float) -> float:
        """Return a lower bound of the seconds per token that any larger step adds to this one."""
        here = self.at(size)
        first = bisect_right(self.sizes, size)
        further = zip(self.sizes[first:], self._seconds[first:], strict=True)
        slopes = [(seconds - here) / (other - size) for other, seconds in further]
        return min(*slopes, self._slopes[-1]) if slopes else self._slopes[-1]

    def is_stale(self, size: int) -> bool:
        """Return whether a step of this size should be observed again, soon after the start."""
        if not self.sizes[0] <= size <= self._largest_measured:
            return False
        if self._scale_doubt > _UNKNOWN_SCALE:
            return True
        known = min(self._sizes, key=lambda known: abs(known.tokens - size))
        interval = min(8 << known.num_seen, _LONGEST_INTERVAL)
        return self._num_observed - known.last_seen >= interval

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from a step."""
        if seconds <= 0 or tokens < self.sizes[0]:
            return
        self._num_observed += 1
        size = self._find_or_add(tokens)
        deviation = log(seconds) - size.seconds - self._scale
        self._scale_doubt += _SCALE_DRIFT
        doubt = self._scale_doubt + size.doubt + _NOISE
        if size.num_seen:
            change = _agreed(deviation, size.deviation)
        else:
            change = _agreed(deviation, self._deviation)
        scale_share = self._scale_doubt / doubt
        size_share = size.doubt / doubt
        self._scale += scale_share * change
        self._move(size, size_share * change)
        if abs(deviation - change) < _SURPRISE:
            self._scale_doubt *= 1 - scale_share
            size.doubt *= 1 - size_share
        size.deviation = self._deviation = deviation
        size.num_seen += 1
        size.last_seen = self._num_observed
        if self._num_observed % 64 == 0:
            self._forget()
        self._rebuild()

    def rescale(self, deviation: float) -> None:
        """Learn from the logarithm of observed by expected seconds, whatever the sizes."""
        self._scale += 0.5 * _agreed(deviation, self._deviation)
        self._deviation = deviation
        self._rebuild()

    def _move(self, size: _Size, change: float) -> None:
        """Correct a size. If it is cheaper than measured, those that were not observed follow, the
        near ones more: so they are tried.
        """
        size.seconds += change
        if change < -_LEAST_CHANGE and size.seconds < size.start:
            for other in self._sizes:
                if not other.num_seen and other is not size:
                    low, high = sorted((other.tokens, size.tokens))
                    other.seconds += change * low / high

    def _find_or_add(self, tokens: int) -> _Size:
        """Return the size of so many tokens; if it is new, it is added with what is expected."""
        i = bisect_left(self.sizes, tokens)
        if i < len(self.sizes) and self.sizes[i] == tokens:
            return self._sizes[i]
        added = [size for size in self._sizes if size.is_added]
        if len(added) == _MAX_ADDED:
            oldest = min(added, key=lambda size: size.last_seen)
            self._sizes.remove(oldest)
            i -= oldest.tokens < tokens
        expected = log(self.at(tokens)) - self._scale
        size = _Size(tokens, expected, expected, self._doubt(tokens), is_added=True)
        self._sizes.insert(i, size)
        return size

    def _doubt(self, tokens: int) -> float:
        """Return how much to doubt what is expected of a size that was not measured."""
        return _BETWEEN_DOUBT if tokens <= self._largest_measured else _BEYOND_DOUBT

    def _forget(self) -> None:
        for size in self._sizes:
            if self._num_observed - size.last_seen > _LONGEST_INTERVAL:
                size.seconds += 0.1 * (size.start - size.seconds)
                size.doubt = self._doubt(size.tokens) if size.is_added else _MEASURED_DOUBT
                size.num_seen = 0

    def _rebuild(self) -> None:
        """Set the seconds, which never fall with the size, and the slopes after each size."""
        self.sizes = [size.tokens for size in self._sizes]
        largest_first = (exp(size.seconds + self._scale) for size in reversed(self._sizes))
        self._seconds = list(accumulate(largest_first, min))[::-1]
        points = pairwise(zip(self.sizes, self._seconds, strict=True))
        self._slopes = [(t1 - t0) / (n1 - n0) for (n0, t0), (n1, t1) in points]
        proportional = self._seconds[-1] / self.sizes[-1]
        # A curve that ends flat must rise at some size.
        self._slopes.append(max([proportional, *self._slopes[-1:]]))


def _agreed(deviation: float, previous: float) -> float:
    """Return the smaller of two deviations in the same direction; 0 for opposite ones."""
    return min(deviation, previous, key=abs) if deviation * previous > 0 else 0.0


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
