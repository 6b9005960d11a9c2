"""What `speculation --json` writes and tools/pictures/speculation.py draws: speed-ups.

Needs only the standard library.
"""

import dataclasses
import json
from pathlib import Path


@dataclasses.dataclass
class Speedup:
    """One batch size and one acceptance."""

    batch: int
    acceptance: float
    measured: float
    """Seconds without speculation over seconds with it: the median of the rounds."""
    ideal: float
    """The best fixed number of drafts, by the measured cost of steps."""
    num_drafts: int
    """The ideal's number of drafts."""
    acceptance_length: float
    """Measured mean tokens of a step with a draft."""
    rounds: list[float]

    @property
    def share(self) -> float:
        """The measured speed-up as a share of the ideal."""
        return self.measured / self.ideal


@dataclasses.dataclass
class Speedups:
    """The speed-ups of one run, and how they were measured."""

    command: str
    date: str
    processor: str
    model: str
    num_threads: int
    points: list[Speedup]

    @classmethod
    def load(cls, path: Path) -> "Speedups":
        """Return the speed-ups in a JSON file."""
        fields = json.loads(path.read_text(encoding="utf-8"))
        fields["points"] = [Speedup(**point) for point in fields["points"]]
        return cls(**fields)

    def save(self, path: Path) -> None:
        """Write a JSON file."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")


def ideal_speedup(
    batch: int, acceptance: float, step_seconds: dict[int, float], max_drafts: int
) -> tuple[float, int]:
    """Return the largest speed-up over fixed numbers of drafts, and that number of drafts.

    K drafts give (1 - p^(K + 1)) / (1 - p) tokens a step on average (Leviathan et al. 2023), in the
    time of a step of `batch` (K + 1) tokens.

    Args:
        step_seconds: by the tokens of a step; sizes between two measured ones are interpolated.
    """
    best = (1.0, 0)
    for drafts in range(max_drafts + 1):
        size = batch * (drafts + 1)
        if size > max(step_seconds):
            break
        tokens = sum(acceptance**i for i in range(drafts + 1))
        cost = interpolated(step_seconds, size) / interpolated(step_seconds, batch)
        if tokens / cost > best[0]:
            best = tokens / cost, drafts
    return best


def rising(step_seconds: dict[int, float]) -> dict[int, float]:
    """Return the times with noise removed: no step takes longer than a larger one."""
    sizes = sorted(step_seconds)
    return {n: min(step_seconds[m] for m in sizes if m >= n) for n in sizes}


def interpolated(step_seconds: dict[int, float], size: int) -> float:
    """Return the seconds of a step of `size` tokens, linear between measured sizes."""
    if size in step_seconds:
        return step_seconds[size]
    low = max(n for n in step_seconds if n < size)
    high = min(n for n in step_seconds if n > size)
    share = (size - low) / (high - low)
    return step_seconds[low] * (1 - share) + step_seconds[high] * share
