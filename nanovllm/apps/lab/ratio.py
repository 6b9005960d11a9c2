"""What pairs of measurements show: an estimate of their ratio, an interval, and a verdict.

Wilcoxon's signed-rank test on the logarithms of the ratios, and its interval (Hollander, Wolfe and
Chicken, Nonparametric Statistical Methods, section 3.3). The two processes of a pair take turns in
random order, so without a difference a ratio is as likely as its inverse: that is all that the test
assumes. It is exact for few pairs, and for noise with bursts, where a t-test is not.
"""

import math
import statistics
from collections.abc import Sequence as Seq
from typing import NamedTuple

FASTER, SLOWER, NOTHING = "faster", "slower", "no difference shown"


class Ratio(NamedTuple):
    """How many times as long something takes."""

    estimate: float
    """The median of the geometric means of all two pairs (Hodges and Lehmann)."""
    low: float
    high: float
    """The interval of all ratios that the pairs do not contradict."""

    @property
    def verdict(self) -> str:
        """FASTER, SLOWER or NOTHING."""
        return SLOWER if self.low > 1 else FASTER if self.high < 1 else NOTHING


def ratio_of(logs: Seq[float], error: float) -> Ratio:
    """Return the ratio that pairs show.

    Args:
        logs: of each pair, the logarithm of its ratio; at least `fewest_pairs(error)`.
        error: how often at most the interval lacks 1 although there is no difference.
    """
    means = sorted((a + b) / 2 for i, a in enumerate(logs) for b in logs[i:])
    cut = _rank(len(logs), error)
    low, high = means[cut - 1], means[len(means) - cut]
    return Ratio(math.exp(statistics.median(means)), math.exp(low), math.exp(high))


def fewest_pairs(error: float) -> int:
    """Return how many pairs an interval needs: with fewer, none may be so wide."""
    return math.ceil(math.log2(2 / error))


def _rank(count: int, error: float) -> int:
    """Return which of the means, from both ends, bound the interval: the highest rank r for which
    the sum of the positive ranks is below r with a probability of at most error / 2.
    """
    sums = [1]  # by sum: how many sets of the ranks up to now have it
    for rank in range(1, count + 1):
        longer = [*sums, *[0] * rank]
        for total, number in enumerate(sums):
            longer[total + rank] += number
        sums = longer
    found, below = 0, 0
    while below + sums[found] <= error / 2 * 2**count:
        below += sums[found]
        found += 1
    assert found, f"{count} pairs are too few for an error of {error}"
    return found
