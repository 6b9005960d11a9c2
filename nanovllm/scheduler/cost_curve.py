"""What a step of so many tokens costs: measured at start, then corrected by the steps themselves.

Knows no acceptance and no drafts.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import exp, log

_LONGEST_INTERVAL = 128
"""Steps after which a size counts as unobserved."""
_KNOWN = 3
"""Number of observations from which a size's seconds are known."""
_TRIALS = 2
"""Number of observations that end a size's discount."""
_MAX_ADDED = 32
"""Number of sizes that may be added to the measured ones."""


class CostCurve:
    """Seconds by size: measured at start, interpolated, and corrected by what is observed.

    A scale, common to all sizes, follows for example growing contexts. Each measured size has a
    correction of its own, which moves slowly once the size is known. If a size is new, its first
    observations may mean a wrong measurement or another scale. They are then taken so that the
    sizes not observed yet look cheap: those are tried, and corrected.

    Scale and corrections move only as far as two observations in a row agree on, so that a single
    slow step changes nothing. The correction of a size that is no longer observed is slowly
    forgotten. A size between measured ones is added if interpolation is wrong there, as at the edge
    of a stair.

    Without measurements the cost is taken as proportional to the size, so no draft ever pays.

    Args:
        discount: share by which an untried size counts as cheaper, but never as cheaper than the
            next smaller size. So a size is tried, even if the machine was slow while it was
            measured.
    """

    def __init__(self, measured: Sequence[tuple[int, float]], discount: float = 0.0) -> None:
        measured = measured or ((1, 1.0),)
        self._discount = discount
        self.sizes = [size for size, _ in measured]
        self._start = [log(max(seconds, 1e-9)) for _, seconds in measured]
        self._logs = list(self._start)
        self._num_seen = [0.0] * len(self.sizes)
        self._last_seen = [0] * len(self.sizes)
        self._residuals = [0.0] * len(self.sizes)
        self._between: dict[int, float] = {}  # last residual of sizes that were not measured
        self._max_sizes = len(self.sizes) + _MAX_ADDED
        self._tail: float | None = None  # observed slope beyond the largest size, without scale
        self._tail_seen = 0.0
        self._log_scale = self._residual = 0.0
        self._num_observed = 0
        self._rebuild()

    def at(self, size: float) -> float:
        """Return the expected seconds; beyond the largest measured size by the last slope."""
        i = max(bisect_right(self.sizes, size) - 1, 0)
        return self._seconds[i] + self._slopes[i] * max(size - self.sizes[i], 0)

    def least_slope(self, size: float) -> float:
        """Return a lower bound of the seconds per token that any larger step adds to this one."""
        here, first = self.at(size), bisect_right(self.sizes, size)
        further = zip(self.sizes[first:], self._seconds[first:], strict=True)
        slopes = [(seconds - here) / (other - size) for other, seconds in further]
        return min(*slopes, self._slopes[-1]) if slopes else self._slopes[-1]

    def is_stale(self, size: int) -> bool:
        """Return whether a step of this size should be observed again, soon after the start."""
        if not self.sizes[0] <= size <= self.sizes[-1]:
            return False
        i, share = self._position(size)
        i += share > 0.5
        interval = min(8 << int(self._num_seen[i]), _LONGEST_INTERVAL)
        return self._num_observed - self._last_seen[i] >= interval

    def observe(self, size: int, seconds: float) -> None:
        """Learn from a step. Beyond the largest measured size, it tells the slope there."""
        if seconds <= 0 or size < self.sizes[0]:
            return
        if size > self.sizes[-1]:
            self._observe_tail(size, seconds)
            return
        self._num_observed += 1
        i, share = self._position(size)
        expected = exp(self._logs[i]) * (1 - share)
        if share:
            expected += exp(self._logs[i + 1]) * share
        residual = log(seconds / expected) - self._log_scale
        nearest = i + (share > 0.5)
        is_known = self._num_seen[nearest] >= _KNOWN
        others = self._num_seen[:nearest] + self._num_seen[nearest + 1 :]
        follows = is_known or (residual < 0 and max(others, default=0.0) < _KNOWN)
        if not (share and self._add_size(i + 1, size, log(expected), residual)):
            for j, part in ((i, 1 - share), (i + 1, share)):
                if part > 0:
                    self._correct(j, part, residual, may_move=is_known or not follows)
        if self._num_observed % 64 == 0:
            self._forget()
        self.rescale(residual if follows else 0.0)

    def rescale(self, residual: float) -> None:
        """Learn from the logarithm of observed by expected seconds, whatever the sizes."""
        self._log_scale += 0.5 * _agreed(residual, self._residual)
        self._residual = residual
        self._rebuild()

    def _position(self, size: int) -> tuple[int, float]:
        """Return the measured size at or below `size`, and how far it is on the way to the next."""
        i = bisect_right(self.sizes, size) - 1
        if self.sizes[i] == size:
            return i, 0.0
        return i, (size - self.sizes[i]) / (self.sizes[i + 1] - self.sizes[i])

    def _correct(self, i: int, part: float, residual: float, *, may_move: bool) -> None:
        """Move one size's seconds towards an observation that concerns it in part."""
        rate = part * max(1 / max(self._num_seen[i], 1.0), 0.1) * may_move
        change = _agreed(residual, self._residuals[i])
        self._logs[i] += rate * min(max(change, -0.5), 0.5)
        self._residuals[i] = residual
        self._num_seen[i] += part
        self._last_seen[i] = self._num_observed

    def _add_size(self, i: int, size: int, expected: float, residual: float) -> bool:
        """Insert a size at index `i` if interpolation is wrong there; return whether it did."""
        change = _agreed(residual, self._between.get(size, 0.0))
        self._between[size] = residual
        if abs(change) < 0.1 or len(self.sizes) >= self._max_sizes:
            return False
        self.sizes.insert(i, size)
        self._start.insert(i, expected)
        self._logs.insert(i, expected + min(max(change, -0.3), 0.3))
        self._num_seen.insert(i, float(_TRIALS))
        self._last_seen.insert(i, self._num_observed)
        self._residuals.insert(i, 0.0)
        return True

    def _observe_tail(self, size: int, seconds: float) -> None:
        largest = exp(self._logs[-1] + self._log_scale)
        slope = max(seconds - largest, 0.0) / (size - self.sizes[-1])
        slope *= exp(-self._log_scale)
        agreed, self._tail_seen = min(slope, self._tail_seen), slope
        before = self._slopes[-1] * exp(-self._log_scale)
        self._tail = before + 0.5 * (1 - self.sizes[-1] / size) * (agreed - before)
        self._rebuild()

    def _forget(self) -> None:
        for i, last_seen in enumerate(self._last_seen):
            if self._num_observed - last_seen > _LONGEST_INTERVAL:
                self._logs[i] += 0.1 * (self._start[i] - self._logs[i])
                self._num_seen[i] = 0.9 * min(self._num_seen[i], 10.0)

    def _rebuild(self) -> None:
        """Set the seconds, which never fall with the size, and the slopes behind each size."""
        largest_first = (exp(x + self._log_scale) for x in reversed(self._logs))
        self._seconds = list(accumulate(largest_first, min))[::-1]
        last = self._last_slope()  # before the discount, which would count again with each token
        for i in range(1, len(self.sizes)):
            if self._num_seen[i] < _TRIALS:
                cheaper = (1 - self._discount) * self._seconds[i]
                self._seconds[i] = max(cheaper, self._seconds[i - 1])
        points = pairwise(zip(self.sizes, self._seconds, strict=True))
        self._slopes = [(t1 - t0) / (n1 - n0) for (n0, t0), (n1, t1) in points]
        self._slopes.append(last)

    def _last_slope(self) -> float:
        """Return the slope behind the largest size, from `_seconds` without discounts."""
        if self._tail is not None:
            return self._tail * exp(self._log_scale)
        proportional = self._seconds[-1] / self.sizes[-1]
        if len(self.sizes) == 1:
            return proportional
        slope = (self._seconds[-1] - self._seconds[-2]) / (self.sizes[-1] - self.sizes[-2])
        return max(slope, proportional / 4)  # a curve that ends flat must rise at some size


def _agreed(residual: float, previous: float) -> float:
    """Return the smaller of two deviations in the same direction; 0 for opposite ones."""
    return min(residual, previous, key=abs) if residual * previous > 0 else 0.0
