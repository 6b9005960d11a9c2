"""Measures how long steps take, and at start how long functions take."""

import itertools
import time
from collections.abc import Callable, Sequence as Seq

import torch

from nanovllm.platform import Platform
from nanovllm.utils.distributed import broadcast_from_first

_MIN_REPEATS = 2
_MIN_SECONDS = 5e-3  # shorter runs are repeated until they took so long in sum


def measure_seconds(
    run: Callable[[int], object], sizes: Seq[int], platform: Platform
) -> tuple[tuple[int, float], ...]:
    """Return (size, seconds of `run(size)`) for each of `sizes`: the least of a few runs.

    The sizes take turns, so that a slow moment of the machine meets one run of several sizes and
    not all runs of one. The first rank decides how often, so that every rank makes the same calls:
    `run` may use collectives.
    """
    run(sizes[0])  # the first run compiles, allocates and reads weights
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    unfinished = list(sizes)
    while unfinished:
        enough = torch.zeros(len(unfinished), dtype=torch.int64, device=platform.device)
        for i, size in enumerate(unfinished):
            platform.synchronize()
            start = time.perf_counter()
            run(size)
            platform.synchronize()
            found = seconds[size]
            found.append(time.perf_counter() - start)
            enough[i] = len(found) >= _MIN_REPEATS and sum(found) >= _MIN_SECONDS
        broadcast_from_first(enough)
        unfinished = [
            size for size, ends in zip(unfinished, enough.tolist(), strict=True) if not ends
        ]
    return tuple((size, min(found)) for size, found in seconds.items())


class StepTimer:
    """Measures the device's seconds from its making to the first mark, and from each mark to the
    next.
    """

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._marks = [platform.record(timed=True)]

    def mark(self) -> None:
        self._marks.append(self._platform.record(timed=True))

    def seconds(self) -> list[float]:
        """Return the durations. The device must have reached the last mark."""
        pairs = itertools.pairwise(self._marks)
        return [start.seconds_until(end) for start, end in pairs]
