"""How long a step takes, as a function of what it computes: fitted to measured steps.

The function is linear in what a step reads and multiplies, and in the number of its tokens it has a
corner at each of `KNOTS`: up to some tokens the weights that all of them share decide, and after
that the products do. All coefficients are 0 or more. What was not measured lies on a straight line.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence as Seq
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pydantic
from scipy.optimize import nnls

from nanovllm.apps.plan.options import OF_WORKERS
from nanovllm.core.messages import Row
from nanovllm.core.worker_info import WorkerInfo
from nanovllm.errors import ConfigError

KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Numbers of tokens between which a step's time is interpolated, and after which it goes on."""
_STRAIGHT = 0.02
"""How much a corner counts beside a measured step's error, so that it takes measured steps."""


class StepWork(NamedTuple):
    """What a step computes."""

    tokens: int
    has_prompt: int
    """1 if a row has more than one token: a GPU's graphs are for steps without such rows."""
    rows: int
    samples: int
    keys: int
    """Tokens whose keys and values a row reads, summed over the rows."""
    pairs: int
    """Pairs of a token and one that it sees, itself included."""


def work_of(rows: Iterable[Row]) -> StepWork:
    """Return what the rows of a step compute."""
    tokens = num_rows = samples = keys = pairs = 0
    for _, _, start, count, is_last, drafts, _ in rows:
        tokens += count
        num_rows += 1
        samples += is_last + drafts
        keys += start + count
        pairs += count * start + (count * (count + 1) >> 1)
    return StepWork(tokens, int(tokens > num_rows), num_rows, samples, keys, pairs)


@dataclasses.dataclass(frozen=True)
class StepCost:
    """The seconds of steps of one engine on one machine.

    Args:
        at_knots: by the number of tokens, those of `KNOTS`.
        for_prompt, per_row, per_sample, per_key, per_pair: what each adds.
        info: what the engine's workers found: with it a scheduler can be made.
        options: the engine's.
        error: the median and the 90th percentile of |estimate - measured| / measured, of steps that
            were not used to fit.
        source: what was measured, in words.
    """

    at_knots: tuple[float, ...]
    for_prompt: float
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
        tokens, has_prompt, rows, samples, keys, pairs = work
        seconds = float(np.dot(_weights(tokens), self.at_knots)) + self.for_prompt * has_prompt
        seconds += self.per_row * rows + self.per_sample * samples
        return seconds + self.per_key * keys + self.per_pair * pairs

    def with_options(self, options: Mapping[str, Any]) -> "StepCost":
        """Return the cost of an engine with other options, or whose workers found other sizes."""
        of_workers = {name: options[name] for name in OF_WORKERS if name in options}
        own = {name: value for name, value in options.items() if name not in of_workers}
        info = dataclasses.replace(self.info, **of_workers)
        return dataclasses.replace(self, info=info, options={**self.options, **own})

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_bytes(pydantic.TypeAdapter(StepCost).dump_json(self, indent=1) + b"\n")

    @classmethod
    def load(cls, path: Path) -> "StepCost":
        """Read what `save` wrote.

        Raises:
            ConfigError: there is no such file, or it is another one.
        """
        try:
            found: StepCost = pydantic.TypeAdapter(StepCost).validate_json(path.read_bytes())
        except OSError as error:
            raise ConfigError(
                f"--cost {path}: {error.strerror}: make it by lab calibrate"
            ) from error
        except pydantic.ValidationError as error:
            raise ConfigError(
                f"--cost {path} is not what `nanovllm lab calibrate` writes ({error!r:.200})"
            ) from error
        return found


@functools.lru_cache(4096)
def _weights(tokens: int) -> np.ndarray:
    """Return how much each knot's time counts for a number of tokens."""
    upper = min(max(int(np.searchsorted(KNOTS, tokens)), 1), len(KNOTS) - 1)
    low, high = KNOTS[upper - 1], KNOTS[upper]
    weights = np.zeros(len(KNOTS))
    weights[upper] = (tokens - low) / (high - low)
    weights[upper - 1] = 1 - weights[upper]
    return weights


def fit(
    works: Seq[StepWork], seconds: Seq[float], info: WorkerInfo, options: dict[str, Any], about: str
) -> StepCost:
    """Return the cost whose squared relative errors are least, and that does not fall with the
    number of tokens. Every fifth step is held out.
    """
    num_knots = len(KNOTS)
    ascending = np.tril(np.ones((num_knots, num_knots)))  # from what each knot adds to their sums
    matrix = np.array([[*(_weights(work.tokens) @ ascending), *work[1:]] for work in works])
    largest, took = max(zip(works, seconds, strict=True))
    matrix /= np.array(seconds)[:, None]  # the right sum of each row is 1
    held_out = np.arange(len(works)) % 5 == 4
    straight = np.zeros((num_knots - 2, matrix.shape[1]))
    for knot in range(2, num_knots):  # as steep as before
        straight[knot - 2, knot] = _STRAIGHT / (took / largest.tokens * KNOTS[knot])
        straight[knot - 2, knot - 1] = -2 * straight[knot - 2, knot]
    fitted = np.concatenate((matrix[~held_out], straight))
    target = np.concatenate((np.ones((~held_out).sum()), np.zeros(num_knots - 2)))
    sizes = np.maximum(np.linalg.norm(fitted, axis=0), 1e-30)
    found = nnls(fitted / sizes, target)[0] / sizes
    errors = np.abs(matrix[held_out] @ found - 1) if held_out.any() else np.zeros(1)
    error, high = np.quantile(errors, (0.5, 0.9)).tolist()
    at_knots = tuple((ascending @ found[:num_knots]).tolist())
    prompt, row, sample, key, pair = found[num_knots:].tolist()
    info = dataclasses.replace(info, encoder=None, arithmetic=None)
    return StepCost(at_knots, prompt, row, sample, key, pair, info, options, (error, high), about)
