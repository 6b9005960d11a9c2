"""speculation.svg: the speed-up of speculation by acceptance and batch size, against the ideal.

`python -m benchmarks.speculation --json docs/pictures/speculation.json` measures what it shows.
"""

import textwrap
from math import log2
from pathlib import Path

from benchmarks.speedups import Speedup, Speedups
from tools.svg import Drawing

DATA = Path(__file__).parent.parent.parent / "docs" / "pictures" / "speculation.json"
WIDTH, HEIGHT = 880, 400
LEFT, RIGHT, TOP, BOTTOM = 50, 862, 130, 330
GAP = 18
"""Pixels between two panels."""
TICKS = (0.5, 1, 2, 4, 8, 16)


class Panel:
    """The axes for one batch size: acceptance to the right, the logarithm of the speed-up upwards.

    Args:
        highest: the largest speed-up of the picture.
    """

    def __init__(self, number: int, num_panels: int, highest: float) -> None:
        width = (RIGHT - LEFT + GAP) / num_panels
        self.left = LEFT + number * width
        self.right = self.left + width - GAP
        self.low, self.high = log2(0.8), log2(1.15 * highest)

    def x(self, acceptance: float) -> float:
        """Return the x coordinate of an acceptance."""
        return self.left + (self.right - self.left) * acceptance

    def y(self, speedup: float) -> float:
        """Return the y coordinate of a speed-up."""
        return BOTTOM - (BOTTOM - TOP) * (log2(speedup) - self.low) / (self.high - self.low)


def draw() -> str:
    """Return the picture."""
    found = Speedups.load(DATA)
    batches = sorted({point.batch for point in found.points})
    highest = max(max(point.ideal, point.measured) for point in found.points)
    drawing = Drawing(
        WIDTH,
        HEIGHT,
        "Speed-up by acceptance and batch size, beside the ideal",
        "With one sequence speculation gains most. With many, a step of more tokens costs more, "
        "and the controller proposes few tokens or none.",
    )
    drawing.text(18, 32, "Speculation pays while drafts cost a step little", size=17, bold=True)
    how = f"{found.model}; {found.processor}, {found.num_threads} threads"
    drawing.text(18, 52, textwrap.shorten(how, 130), "muted", size=12)
    drawing.text(18, 70, f"{found.date}: {found.command}", "muted", size=12)
    drawing.line([(560, 92), (584, 92)], "orange", stroke_width=2)
    drawing.text(592, 96, "measured", size=12)
    drawing.line([(670, 92), (694, 92)], "blue", stroke_width=1.5, dashed=True)
    drawing.text(702, 96, "best fixed number of drafts", size=12)
    drawing.text(18, TOP - 34, "times as fast as without", "muted", size=12)
    for number, batch in enumerate(batches):
        points = sorted((p for p in found.points if p.batch == batch), key=lambda p: p.acceptance)
        _draw_panel(drawing, Panel(number, len(batches), highest), batch, points, number == 0)
    middle = (LEFT + RIGHT) / 2
    drawing.text(
        middle, BOTTOM + 44, "probability that a draft is right", "muted", size=12, anchor="middle"
    )
    return drawing.svg()


def _draw_panel(
    drawing: Drawing, panel: Panel, batch: int, points: list[Speedup], first: bool
) -> None:
    title = f"{batch} sequence{'s' if batch > 1 else ''}"
    drawing.text(panel.left + 6, TOP - 8, title, bold=True)
    for tick in TICKS:
        y = panel.y(tick)
        if TOP <= y <= BOTTOM:
            drawing.line([(panel.left, y), (panel.right, y)], "muted" if tick == 1 else "line")
            if first:
                drawing.text(LEFT - 8, y + 4, f"{tick:g}", "muted", size=12, anchor="end")
    for acceptance in (0, 0.5, 1):
        x = panel.x(acceptance)
        drawing.line([(x, BOTTOM), (x, BOTTOM + 5)], "muted")
        drawing.text(x, BOTTOM + 19, f"{acceptance:g}", "muted", size=12, anchor="middle")
    ideal = [(panel.x(point.acceptance), panel.y(point.ideal)) for point in points]
    drawing.line(ideal, "blue", stroke_width=1.5, dashed=True)
    measured = [(panel.x(point.acceptance), panel.y(point.measured)) for point in points]
    drawing.line(measured, "orange", stroke_width=2)
    for x, y in measured:
        drawing.circle(x, y, 3.5, fill="orange")
