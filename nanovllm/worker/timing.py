"""Measures how long steps take, and at start how long functions take."""

import itertools
import time
from collections.abc import Callable, Sequence as Seq
from typing import Any

import torch

from nanovllm.utils.distributed import broadcast_from_first

_MIN_REPEATS = 2
_MIN_SECONDS = 5e-3
"""Shorter runs are repeated until they took so long in sum."""


def measure_seconds(
    run: Callable[[int], object], sizes: Seq[int], device: torch.device
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
        enough = torch.zeros(len(unfinished), dtype=torch.int64, device=device)
        for i, size in enumerate(unfinished):
            _wait_for(device)
            start = time.perf_counter()
            run(size)
            _wait_for(device)
            found = seconds[size]
            found.append(time.perf_counter() - start)
            enough[i] = len(found) >= _MIN_REPEATS and sum(found) >= _MIN_SECONDS
        broadcast_from_first(enough)
        unfinished = [
            size for size, ends in zip(unfinished, enough.tolist(), strict=True) if not ends
        ]
    return tuple((size, min(found)) for size, found in seconds.items())


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class StepTimer:
    """Measures the seconds from its making to the first mark, and from each mark to the next.

    On CUDA they are the device's, because a launch returns at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        if not self._on_device:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append(event)

    def seconds(self) -> list[float]:
        """Return the durations. On CUDA the device must have reached the last mark."""
        pairs = itertools.pairwise(self._marks)
        if self._on_device:
            return [start.elapsed_time(end) / 1000 for start, end in pairs]
        return [end - start for start, end in pairs]
