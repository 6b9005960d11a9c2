"""Measures at start how long functions take. Knows no model."""

import time
from collections.abc import Callable, Sequence as Seq

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
