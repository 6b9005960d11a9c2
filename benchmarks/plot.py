"""Draw a comparison that `python -m benchmarks.versus --json FILE` wrote, as a bar chart in SVG.

The bars are times relative to the first engine's.
"""

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.comparison import Comparison, Row
from tools.svg import Drawing

COLOURS = ("blue", "orange", "green", "muted")
"""Colours of the engines, in order."""
WIDTH, LEFT, RIGHT = 800, 300, 660
"""Pixels: the width of the picture, and the left and right end of the longest bar."""
TOP, BAR, GAP = 80, 15, 16
"""Pixels: the top of the first case, the height of a bar, and the space between two cases."""


class Group(NamedTuple):
    """A case: its name, the lines that explain it, and its bars."""

    name: str
    words: list[str]
    rows: list[Row]

    @property
    def height(self) -> int:
        """Pixels of the bars or of the text, whichever is higher."""
        return max(BAR * len(self.rows), BAR * (1 + len(self.words)))


def draw(comparison: Comparison) -> str:
    """Return the chart: a group of bars for each case, and one for the engines' start."""
    engines = list(comparison.startup)
    first = comparison.startup[engines[0]]
    startup = [Row("", name, s, s / first, [s]) for name, s in comparison.startup.items()]
    groups = [
        Group(case, words.split("; "), [row for row in comparison.rows if row.case == case])
        for case, words in comparison.cases.items()
    ]
    longest = max((row.ratio for row in comparison.rows), default=1.0)
    groups.append(Group("start until ready", [], startup))
    height = TOP + sum(group.height + GAP for group in groups) + 48
    drawing = Drawing(
        WIDTH,
        height,
        f"Time relative to {engines[0]}",
        f"Bar chart of {', '.join(engines)}: seconds by case, and their ratio to {engines[0]}'s.",
    )
    _draw_head(drawing, comparison, engines)
    one = LEFT + (RIGHT - LEFT) / longest
    drawing.line([(one, TOP - 8), (one, height - 58)], "muted", dashed=True)
    y = TOP
    for group in groups:
        _draw_label(drawing, y + group.height / 2, group)
        bar = y + (group.height - BAR * len(group.rows)) / 2
        for row in group.rows:
            colour = COLOURS[engines.index(row.engine) % len(COLOURS)]
            _draw_bar(drawing, bar, row, colour, longest)
            bar += BAR
        y += group.height + GAP
    for up, words in (
        (34, f"{comparison.processor}; {comparison.model}"),
        (17, f"{comparison.date}: {comparison.command}"),
    ):
        drawing.text(16, height - up, textwrap.shorten(words, 115), "muted", size=11)
    return drawing.svg()


def _draw_head(drawing: Drawing, comparison: Comparison, engines: Sequence[str]) -> None:
    drawing.text(16, 30, f"Time relative to {engines[0]}", size=17, bold=True)
    drawing.text(16, 50, "shorter bars are faster", "muted")
    x = float(LEFT)
    for name, colour in zip(engines, COLOURS * len(engines), strict=False):
        drawing.rect(x, 40, 11, 11, fill=colour, radius=2)
        drawing.text(x + 17, 50, name)
        x += 17 + 8 * len(name) + 22


def _draw_label(drawing: Drawing, middle: float, group: Group) -> None:
    """Write a case's name and below it the lines that explain it, around y = `middle`."""
    y = middle + 4 - 7 * len(group.words)
    drawing.text(16, y, group.name, bold=True)
    for number, part in enumerate(group.words, start=1):
        drawing.text(16, y + 15 * number, part, "muted", size=11)


def _draw_bar(drawing: Drawing, y: float, row: Row, colour: str, longest: float) -> None:
    """Draw a bar. A bar with a ratio above `longest` is cut and gets a gap near its end."""
    length = (RIGHT - LEFT) * min(row.ratio / longest, 1)
    drawing.rect(LEFT, y + 1, length, BAR - 2, fill=colour, radius=2)
    if row.ratio > longest:
        x = LEFT + length - 22
        drawing.area([(x + 6, y), (x + 11, y), (x + 5, y + BAR), (x, y + BAR)], "paper")
    x = LEFT + length + 7
    drawing.text(x, y + 12, f"{_digits(row.ratio)}×", size=12, bold=True)
    drawing.text(x + 48, y + 12, f"{_digits(row.median)} s", "muted", size=12)


def _digits(value: float) -> str:
    """Return a number with three significant digits."""
    return f"{value:#.3g}".rstrip(".")


def main() -> None:
    """Read a comparison and write its chart."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    parser.add_argument("comparison", type=Path, help="a JSON file")
    parser.add_argument("-o", "--output", type=Path, help="default: beside the JSON file")
    args = parser.parse_args()
    output = args.output or args.comparison.with_suffix(".svg")
    output.write_text(draw(Comparison.load(args.comparison)), encoding="utf-8")
    print(output)


if __name__ == "__main__":
    main()
