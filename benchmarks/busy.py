"""Measure engines on a busy machine: each case alone, next to busy processes, on one core, and with
a limit of 1.5 cores. Print each median time, its ratio to the time alone, and its ratio to the
first engine's time in the same condition (medians over rounds).

A busy process runs in its own session, like another user's work: Linux then divides a core between
the sessions. `1 core` leaves the engine as many threads as it started with. `1.5 cores` needs the
right to create a control group. Engines are named as for benchmarks.versus.
"""

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from benchmarks.versus import CASES, WARM_UP, Engine, engine_parser, started

BUSY = "while True: pass"
PERIOD = 100_000
"""Microseconds of a control group's period, the system's default."""
CPU_GROUPS = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def alone(_pids: list[int]) -> Iterator[None]:
    """Leave the engine alone."""
    yield


def beside(count: int) -> Callable[[list[int]], contextlib.AbstractContextManager[None]]:
    """Return a condition: next to `count` busy processes."""

    @contextlib.contextmanager
    def condition(_pids: list[int]) -> Iterator[None]:
        command = [sys.executable, "-c", BUSY]
        busy = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
        try:
            yield
        finally:
            for process in busy:
                process.kill()
                process.wait()

    return condition


@contextlib.contextmanager
def one_core(pids: list[int]) -> Iterator[None]:
    """Allow all threads of the engine the same core."""
    cores = os.sched_getaffinity(0)
    set_affinity(pids, {min(cores)})
    try:
        yield
    finally:
        set_affinity(pids, cores)


@contextlib.contextmanager
def limited(pids: list[int]) -> Iterator[None]:
    """Allow the engine 1.5 cores, by a control group of version 1 or 2."""
    first_version = CPU_GROUPS / "cpu"
    parent = first_version if first_version.is_dir() else CPU_GROUPS
    group = parent / f"nanovllm-busy-{os.getpid()}"
    group.mkdir()
    try:
        quota = PERIOD * 3 // 2
        if parent == first_version:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (group / "cpu.max").write_text(f"{quota} {PERIOD}")
        move(pids, group)
        try:
            yield
        finally:
            move(pids, parent)
    finally:
        group.rmdir()


CONDITIONS = {
    "alone": alone,
    "1 busy": beside(1),
    "2 busy": beside(2),
    "1 core": one_core,
    "1.5 cores": limited,
}


def set_affinity(pids: list[int], cores: set[int]) -> None:
    """Allow every thread of the processes these cores."""
    for pid in pids:
        for task in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(task), cores)


def move(pids: list[int], group: Path) -> None:
    """Move processes to a control group."""
    for pid in pids:
        (group / "cgroup.procs").write_text(str(pid))


def measure(engines: list[Engine], cases: list[str], conditions: list[str], rounds: int) -> None:
    """Print a row for each case, condition and engine."""
    print(f"| case | condition | engine | seconds | / alone | / {engines[0].name} |")
    print("| --- | --- | --- | --- | --- | --- |")
    for case in cases:
        times: dict[tuple[str, str], list[float]] = {}
        for engine in engines:
            engine.run(WARM_UP, 0)
        for seed in range(rounds):
            for condition in conditions:
                for engine in engines:
                    with CONDITIONS[condition](engine.processes()):
                        seconds = engine.run(CASES[case], seed)
                    times.setdefault((condition, engine.name), []).append(seconds)
        for (condition, name), seconds_of_rounds in times.items():
            own = times[conditions[0], name]
            first = times[condition, engines[0].name]
            cells = [
                f"{median(seconds_of_rounds):.2f}",
                f"{ratio(seconds_of_rounds, own):.2f}",
                f"{ratio(seconds_of_rounds, first):.2f}",
            ]
            print(f"| {case} | {condition} | {name} | {' | '.join(cells)} |", flush=True)


def ratio(seconds: list[float], base: list[float]) -> float:
    """Return the median over rounds of `seconds` divided by `base`."""
    return median(own / other for own, other in zip(seconds, base, strict=True))


def parse_args() -> argparse.Namespace:
    """Return the command line's arguments."""
    cases = ["decode1", "decode16", "decode64", "prefill"]
    parser = engine_parser("python -m benchmarks.busy", __doc__, cases)
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=list(CONDITIONS))
    return parser.parse_args()


def main() -> None:
    """Start the engines, measure them and stop them."""
    args = parse_args()
    conditions = ["alone", *(name for name in args.conditions if name != "alone")]
    with started(args) as engines:
        measure(engines, args.cases, conditions, args.rounds)


if __name__ == "__main__":
    main()
