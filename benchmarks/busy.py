"""Measure engines on a busy machine: each case alone, and next to one and two busy processes. Print
each median time, its ratio to the time alone, and its ratio to the first engine's time beside as
many busy processes (medians over rounds).

A busy process runs in its own session, like another user's work: Linux then divides a core between
the sessions. Engines are named as for benchmarks.versus.
"""

import contextlib
import functools
import subprocess
import sys
from collections.abc import Iterator
from statistics import median

from benchmarks.harness import Table, in_turns, ratio
from benchmarks.versus import Engine, engine_parser, run_round, started

BUSY = "while True: pass"


@contextlib.contextmanager
def beside(count: int) -> Iterator[None]:
    """Keep `count` processes busy inside `with`."""
    command = [sys.executable, "-c", BUSY]
    busy = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def measure(engines: list[Engine], cases: list[str], counts: list[int], rounds: int) -> None:
    """Print a row for each case, number of busy processes and engine; `counts` begins with 0."""
    first = engines[0].name
    table = Table("case", "busy processes", "engine", "seconds", "/ alone", f"/ {first}")

    for case in cases:
        runs = {
            (count, engine.name): functools.partial(run_beside, count, engine, case)
            for count in counts
            for engine in engines
        }
        times = in_turns(runs, rounds)
        for (count, name), seconds in times.items():
            ratios = ratio(seconds, times[0, name]), ratio(seconds, times[count, first])
            table.row(case, count, name, median(seconds), *ratios)


def run_beside(count: int, engine: Engine, case: str, number: int) -> float:
    """Return the seconds of a round next to `count` busy processes."""
    with beside(count):
        return run_round(engine, case, number)


def main() -> None:
    """Start the engines, measure them and stop them."""
    cases = ["decode1", "decode16", "decode64", "prefill"]
    args = engine_parser("busy", __doc__, cases).parse_args()
    with started(args) as engines:
        measure(engines, args.cases, [0, 1, 2], args.rounds)


if __name__ == "__main__":
    main()
