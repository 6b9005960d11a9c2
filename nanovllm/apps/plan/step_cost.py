"""How long a step takes, as a function of what it computes: fitted to measured steps.

The function is linear in what a step reads and multiplies, and in the number of its tokens it has a
corner at each of `KNOTS`: up to some tokens the weights that all of them share decide, and behind
them the products do. All coefficients are 0 or more.
"""

import dataclasses
import json
from collections.abc import Iterable, Sequence as Seq
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nanovllm.core.messages import Row, Schedule
from nanovllm.core.worker_info import DraftInfo, KVInfo, TierInfo, WindowSpec, WorkerInfo
from nanovllm.errors import ConfigError

KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Numbers of tokens between which a step's time is interpolated, and behind which it goes on."""


class StepWork(NamedTuple):
    """What a step computes."""

    tokens: int
    rows: int
    samples: int
    keys: int
    """Tokens whose keys and values a row reads, summed over the rows."""
    pairs: int
    """Pairs of a token and one that it sees, itself included."""


class MeasuredStep(NamedTuple):
    """A step, and how long the engine's loop took for it."""

    work: StepWork
    seconds: float


def work_of(rows: Iterable[Row]) -> StepWork:
    """Return what the rows of a step compute."""
    tokens = num_rows = samples = keys = pairs = 0
    for _, _, start, count, is_last, drafts, _ in rows:
        tokens += count
        num_rows += 1
        samples += is_last + drafts
        keys += start + count
        pairs += count * start + (count * (count + 1) >> 1)
    return StepWork(tokens, num_rows, samples, keys, pairs)


@dataclasses.dataclass(frozen=True)
class StepCost:
    """The seconds of steps of one engine on one machine.

    Args:
        at_knots: by the number of tokens, those of `KNOTS`.
        per_row, per_sample, per_key, per_pair: what each adds.
        info: what the engine's workers found: with it a scheduler can be made.
        options: the engine's.
        error: the median and the 90th percentile of |estimate - measured| / measured, of steps that
            were not used to fit.
        source: what was measured, in words.
    """

    at_knots: tuple[float, ...]
    per_row: float
    per_sample: float
    per_key: float
    per_pair: float
    info: WorkerInfo
    options: dict[str, Any]
    error: tuple[float, float] = (0.0, 0.0)
    source: str = ""

    def seconds(self, work: StepWork) -> float:
        """Return how long a step takes."""
        at = self.at_knots
        tokens = work.tokens
        index = min(max(tokens - 1, 1).bit_length(), len(KNOTS) - 1)
        low = KNOTS[index - 1]
        share = (tokens - low) / (KNOTS[index] - low)
        base = at[index - 1] + (at[index] - at[index - 1]) * share
        more = self.per_row * work.rows + self.per_sample * work.samples
        return base + more + self.per_key * work.keys + self.per_pair * work.pairs

    def of_schedule(self, schedule: Schedule) -> float:
        """Return how long a step takes."""
        return self.seconds(work_of(schedule.rows))

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "StepCost":
        """Read what `save` wrote.

        Raises:
            ConfigError: there is no such file, or it is another one.
        """
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            info = fields["info"]
            windows = tuple(WindowSpec(*window) for window in info["kv"][0])
            info["kv"] = KVInfo(windows, *info["kv"][1:])
            most, follows, *seconds = info["drafts"]
            info["drafts"] = DraftInfo(most, follows, *(tuple(map(tuple, s)) for s in seconds))
            info["tiers"] = info["tiers"] and TierInfo(*info["tiers"])
            fields |= {name: tuple(fields[name]) for name in ("at_knots", "error")}
            return cls(**{**fields, "info": WorkerInfo(**info)})
        except OSError as error:
            raise ConfigError(
                f"--cost {path}: {error.strerror}: make it by lab calibrate"
            ) from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"--cost {path} is not what `nanovllm lab calibrate` writes ({error!r})"
            ) from error


def _row_of(work: StepWork) -> list[float]:
    """Return what the coefficients are multiplied by: the first is the time of one token, the next
    ones what each knot adds to the one before it.
    """
    shares = [
        min(max((work.tokens - low) / (high - low), 0.0), 1.0) for low, high in pairwise(KNOTS)
    ]
    if work.tokens > KNOTS[-1]:
        shares[-1] = (work.tokens - KNOTS[-2]) / (KNOTS[-1] - KNOTS[-2])
    return [1.0, *shares, work.rows, work.samples, work.keys, work.pairs]


def fit(
    steps: Seq[MeasuredStep], info: WorkerInfo, options: dict[str, Any], source: str
) -> StepCost:
    """Return the cost whose squared relative errors are least. Every fifth step is held out."""
    matrix = np.array([_row_of(step.work) for step in steps])
    seconds = np.array([step.seconds for step in steps])
    held_out = np.arange(len(steps)) % 5 == 4
    scaled = (matrix / seconds[:, None])[~held_out]
    found = _non_negative(scaled, np.ones(len(scaled)))
    num_knots = len(KNOTS)
    reached = matrix[:, 1:num_knots].max(0) > 0
    last = int(np.flatnonzero(reached)[-1]) if reached.any() else 0
    for index in range(last + 1, num_knots - 1):  # nothing was measured: it goes on as before
        found[1 + index] = 2 * found[index] if index else 0.0
    at_knots = np.cumsum(found[:num_knots])
    row, sample, key, pair = found[num_knots:].tolist()
    info = dataclasses.replace(info, encoder=None, arithmetic=None)
    knots = tuple(at_knots.tolist())
    cost = StepCost(knots, row, sample, key, pair, info, options, (0.0, 0.0), source)
    judged = [step for step, out in zip(steps, held_out, strict=True) if out]
    errors = [abs(cost.seconds(step.work) / step.seconds - 1) for step in judged] or [0.0]
    quantiles = np.quantile(errors, (0.5, 0.9))
    return dataclasses.replace(cost, error=(float(quantiles[0]), float(quantiles[1])))


def _non_negative(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return the x >= 0 with the least |matrix x - target|, by coordinate descent."""
    sizes = np.linalg.norm(matrix, axis=0)
    scaled = matrix / np.where(sizes > 0, sizes, 1)
    products = scaled.T @ scaled
    right = scaled.T @ target
    x = np.zeros(matrix.shape[1])
    for _ in range(3000):
        for j in np.flatnonzero(sizes):
            x[j] = max(0.0, x[j] + right[j] - products[j] @ x)
    return x / np.where(sizes > 0, sizes, 1)
