"""What the benchmarks share: a parser, a model to measure, runs in turns, and a table.

Needs only the standard library: an engine's interpreter may have nothing else.
"""

import argparse
import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import TypeVar

from benchmarks.shapes import CONFIGS, SMALL, checkpoint

Name = TypeVar("Name")


def make_parser(
    name: str, description: str | None, *, model: bool = True, rounds: int | None = 3
) -> argparse.ArgumentParser:
    """Return the parser of `python -m benchmarks.NAME`.

    Args:
        model: whether there is `--model`, a checkpoint or the name of a shape.
        rounds: the default of `--rounds`; None: there is no such option.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    if model:
        shapes = f"a checkpoint, or a shape with random weights: {', '.join(CONFIGS)}"
        parser.add_argument("--model", help=f"{shapes} (default: {SMALL})")
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds)
    return parser


@contextlib.contextmanager
def loadable(model: str | None) -> Iterator[tuple[str, str]]:
    """Return what `--model` names, and its load_format; files last until the end of `with`."""
    with tempfile.TemporaryDirectory() as directory:
        yield checkpoint(model, directory)


class Table:
    """A Markdown table that is printed row by row."""

    def __init__(self, *heading: str) -> None:
        self.row(*heading)
        self.row(*("---" for _ in heading))

    def row(self, *cells: object) -> None:
        """Print a row. A float has two decimals, or three significant digits if it is small."""
        texts = (_digits(cell) if isinstance(cell, float) else str(cell) for cell in cells)
        print(f"| {' | '.join(texts)} |", flush=True)


def _digits(value: float) -> str:
    return f"{value:.3g}" if 0 < abs(value) < 0.1 else f"{value:.2f}"


def in_turns(runs: Mapping[Name, Callable[[int], float]], rounds: int) -> dict[Name, list[float]]:
    """Return what each run measures in each round, by its name.

    A slow moment of the machine then affects all of them. Round -1 warms up and does not count.
    """
    found: dict[Name, list[float]] = {name: [] for name in runs}
    for number in range(-1, rounds):
        for name, run in runs.items():
            measured = run(number)
            if number >= 0:
                found[name].append(measured)
    return found


def ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """Return the median over rounds of a value divided by the base's in the same round."""
    return median(own / other for own, other in zip(values, base, strict=True))
