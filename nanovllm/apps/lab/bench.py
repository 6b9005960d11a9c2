"""`nanovllm lab bench`: is an engine faster with a plugin than with the default?

Pairs of fresh processes, one with the default and one with the plugin, are alive at the same time
and take turns, round by round: so both meet the same noise. Each pair is a new one, because a
process may be faster than another for as long as it lives, by where its memory happens to lie.
"""

import contextlib
import dataclasses
import json
import math
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence as Seq
from itertools import chain
from typing import Any, NamedTuple

from nanovllm import __version__
from nanovllm.apps.lab.lab_options import BenchOptions
from nanovllm.apps.lab.plugin import Plugin
from nanovllm.apps.lab.workloads import MOST_RUNNING, POOL_TOKENS, WORKLOADS
from nanovllm.errors import ConfigError, EngineDeadError

ENGINE: dict[str, Any] = {
    "max_model_len": 1024,
    "max_num_seqs": MOST_RUNNING,
    "max_num_batched_tokens": 512,
    "kvcache_block_size": 16,
    "num_kvcache_blocks": POOL_TOKENS // 16,
    "num_threads": 1,
}
"""Options of both engines, unless the user sets them. With one thread a process needs one core, and
does not wait for others' threads."""
FASTER, SLOWER, NOTHING = "faster", "slower", "no difference shown"
_ERROR = 0.05
"""How often at most any of the comparisons shows a difference that is not there."""
MEASURES = {"seconds": "seconds", "latency": "seconds until its end, mean of requests"}
"""What is compared, by field of `Round`."""
Rounds = list[list[dict[str, Any]]]
"""Of each pair: of each round, what `Round` has."""
OnStep = Callable[[], object]


class Ratio(NamedTuple):
    """How many times as long the plugin takes: the median of the pairs' ratios, and its interval.

    A pair's processes take turns in random order, so without a difference its ratio is as likely
    above 1 as below; the interval is that of the sign test, which assumes no more.
    """

    median: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """FASTER, SLOWER or NOTHING."""
        return SLOWER if self.low > 1 else FASTER if self.high < 1 else NOTHING


def ratio_of(ratios: Seq[float], error: float) -> Ratio:
    """Return what pairs show.

    Args:
        error: how often at most the interval lacks 1 although there is no difference. The fewest
            pairs for which there is such an interval are `fewest_pairs(error)`.
    """
    ordered, count = sorted(ratios), len(ratios)
    outside = 0  # so many ratios at each end lie outside the interval
    below = 1  # of 2**count equally likely outcomes: those with at most `outside` below 1
    while 2 * (below + math.comb(count, outside + 1)) <= error * 2**count:
        outside += 1
        below += math.comb(count, outside)
    return Ratio(statistics.median(ordered), ordered[outside], ordered[-1 - outside])


def fewest_pairs(error: float) -> int:
    """Return how many pairs an interval needs: with fewer, none may be so wide."""
    return math.ceil(math.log2(2 / error))


class Measure(NamedTuple):
    """A comparison."""

    workload: str
    what: str
    default: float
    """Median of all rounds."""
    plugin: float
    ratio: Ratio
    verdict: str


@dataclasses.dataclass(frozen=True)
class Bench:
    """What the processes measured."""

    model: str
    plugin: str | None
    """The option; None: the default beside itself."""
    engine_options: dict[str, Any]
    rounds: dict[str, tuple[Rounds, Rounds]]
    """By workload: those of the default, and those of the plugin."""
    engine: str = f"nanovllm {__version__}"

    def measures(self) -> list[Measure]:
        """Return all comparisons; together they err in at most one of 20 benches."""
        error = _ERROR / (len(self.rounds) * len(MEASURES))
        return [self._measure(name, field, error) for name in self.rounds for field in MEASURES]

    def _measure(self, workload: str, field: str, error: float) -> Measure:
        default, plugin = (
            [[each[field] for each in pair] for pair in side] for side in self.rounds[workload]
        )
        ratios = [
            statistics.median(b / a for a, b in zip(*pair, strict=True))
            for pair in zip(default, plugin, strict=True)
        ]
        ratio = ratio_of(ratios, error)
        own, others = (statistics.median(chain(*side)) for side in (default, plugin))
        return Measure(workload, MEASURES[field], own, others, ratio, ratio.verdict)

    def counts(self) -> list[tuple[str, str, int, int, bool]]:
        """Return (workload, what, default, plugin, whether each round has the same) of counts.

        A count that is not the same in each round is the median, one that a round had.
        """
        found = []
        for workload, sides in self.rounds.items():
            for what in sides[0][0][0]["counts"]:
                values = [[r["counts"][what] for pair in side for r in pair] for side in sides]
                default, plugin = map(statistics.median_low, values)
                is_exact = all(len({*each}) == 1 for each in values)
                found.append((workload, what, default, plugin, is_exact))
        return found

    def as_json(self) -> dict[str, Any]:
        """Return everything as values that JSON has."""
        found = [{**m._asdict(), "ratio": m.ratio._asdict()} for m in self.measures()]
        return {**dataclasses.asdict(self), "measures": found, "counts": self.counts()}


def bench(
    plugin: Plugin | None,
    model: str,
    engine_options: dict[str, Any],
    options: BenchOptions,
    on_step: OnStep = lambda: None,
) -> Bench:
    """Measure.

    Args:
        plugin: None compares the default with itself.
        engine_options: of both engines.
        on_step: called after each round of a workload in both processes, and after each start.

    Raises:
        ConfigError: a workload is not known, or the engine refuses its options.
        EngineDeadError: an engine ends, as a wrong plugin ends it.
    """
    names = _chosen(options.workloads)
    num_compared = len(names) * len(MEASURES)
    fewest = fewest_pairs(_ERROR / num_compared)
    if options.num_pairs < fewest:
        raise ConfigError(
            f"num_pairs must be at least {fewest} for {num_compared} comparisons: with fewer no "
            f"difference can be shown, got {options.num_pairs}"
        )
    base = {**ENGINE, **engine_options}
    both = [base, base if plugin is None else {**base, **plugin.options}]
    rounds: dict[str, tuple[Rounds, Rounds]] = {name: ([], []) for name in names}
    rng = random.Random(0)
    for _ in range(options.num_pairs):
        with _pair(model, both) as processes:
            on_step()
            for name in names:
                _take_turns(processes, name, options.num_rounds, rng, rounds[name])
                on_step()
    value = None if plugin is None else f"{plugin.kind}={plugin.value}"
    return Bench(model, value, base, rounds)


def num_steps(options: BenchOptions) -> int:
    """Return how often `bench` calls `on_step`."""
    return options.num_pairs * (1 + len(_chosen(options.workloads)))


def _chosen(texts: Seq[str]) -> list[str]:
    """Return the workloads whose names contain one of these texts; all if there is none."""
    found = [name for name in WORKLOADS if not texts or any(text in name for text in texts)]
    if not found:
        raise ConfigError(
            f"workloads {', '.join(texts)!r:.200} is in no workload's name; they are: "
            f"{', '.join(WORKLOADS)}"
        )
    return found


class _Process:
    """A `Player` in a process of its own."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "nanovllm.apps.lab.player"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._send({"model": model, "options": options})

    def play(self, name: str) -> dict[str, Any]:
        self._send(name)
        return self.receive()

    def receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            raise EngineDeadError(f"a process of the bench ended with status {status}")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise EngineDeadError(found["error"])
        return found

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _send(self, job: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `receive` says why
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()


@contextlib.contextmanager
def _pair(model: str, both: Seq[dict[str, Any]]) -> Iterator[list[_Process]]:
    processes: list[_Process] = []
    try:
        for options in both:
            processes.append(_Process(model, options))
        for process in processes:
            process.receive()
        yield processes
    finally:
        for process in processes:
            process.stop()


def _take_turns(
    processes: Seq[_Process],
    name: str,
    num_rounds: int,
    rng: random.Random,
    found: tuple[Rounds, Rounds],
) -> None:
    """Play a workload in both processes in turns, in random order; the first round warms up."""
    for process in processes:
        process.play(name)
    for side in found:
        side.append([])
    for _ in range(num_rounds):
        for index in rng.sample((0, 1), 2):
            found[index][-1].append(processes[index].play(name))


def show(found: Bench) -> Iterator[str]:
    """Yield the lines of a table: what was compared, and what was counted."""
    measures = found.measures()
    yield f"{'':18}{'':46}{'default':>9}{'plugin':>9}{'ratio':>7}  interval"
    for m in measures:
        interval = f"{m.ratio.low:.3f} to {m.ratio.high:.3f}"
        yield (
            f"{m.workload:18}{m.what:46.46}{m.default:9.4g}{m.plugin:9.4g}"
            f"{m.ratio.median:7.3f}  {interval:16}  {m.verdict}"
        )
    for workload, what, default, plugin, is_exact in found.counts():
        if default != plugin:
            ratio = f"{plugin / default:.3f}" if default else "new"
            words = "exact" if is_exact else "median: rounds differ"
            yield f"{workload:18}{what:46}{default:9}{plugin:9}{ratio:>7}  {words}"
    if all(m.verdict == NOTHING for m in measures):
        widest = max(max(m.ratio.high, 1 / m.ratio.low) for m in measures)
        yield f"No difference shown; none is larger than {widest - 1:.1%}, as far as this can tell."
