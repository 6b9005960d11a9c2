"""Measures at start what steps cost, so that the controller knows which drafts pay.

Knows no model: it times functions.
"""

import time
from collections.abc import Callable, Sequence as Seq

import torch

from nanovllm.utils.distributed import broadcast_from_first

_MIN_REPEATS = 2
_MIN_SECONDS = 5e-3
"""Shorter runs are repeated until they took so long in sum."""

STEP_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Tokens of the steps that are measured."""
DRAFT_SIZES = (1, 4, 16, 64)
"""Rows for which proposing is measured."""


def measure_seconds(
    run: Callable[[int], object], sizes: Seq[int], device: torch.device
) -> tuple[tuple[int, float], ...]:
    """Return (size, seconds of `run(size)`) for each of `sizes`: the least of a few runs.

    The first rank decides how often, so that every rank makes the same calls: `run` may use
    collectives.
    """
    found = []
    run(sizes[0])  # the first run compiles, allocates and reads weights
    for size in sizes:
        seconds: list[float] = []
        is_enough = torch.zeros(1, dtype=torch.int64, device=device)
        while not is_enough:
            _wait_for(device)
            start = time.perf_counter()
            run(size)
            _wait_for(device)
            seconds.append(time.perf_counter() - start)
            is_enough.fill_(len(seconds) >= _MIN_REPEATS and sum(seconds) >= _MIN_SECONDS)
            broadcast_from_first(is_enough)
        found.append((size, min(seconds)))
    return tuple(found)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
