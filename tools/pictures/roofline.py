"""roofline.svg: the time of a token in a decode step on a CPU, by the number of sequences.

`python -m benchmarks.step --json docs/pictures/roofline.json` measures what the picture shows.
"""

from math import ceil, log2
from pathlib import Path

from benchmarks.step_times import StepTimes
from tools.svg import Drawing

DATA = Path(__file__).parent.parent.parent / "docs" / "pictures" / "roofline.json"
WIDTH, HEIGHT = 880, 484
LEFT, RIGHT, TOP, BOTTOM = 58, 580, 110, 422
NOTES = 612
"""Left edge of the text next to the plot."""
SERIES = (
    ("step", "whole step", "orange"),
    ("products", "linear layers and head, call by call", "blue"),
)
"""Each series: its part of the step, its name and its colour."""
TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


class Axes:
    """The plot's logarithmic axes. They contain every measured time and both limits."""

    def __init__(self, times: StepTimes) -> None:
        per_token = [
            parts[part] / n for n, parts in times.milliseconds.items() for part, _, _ in SERIES
        ]
        self.low = log2(0.6 * min(*per_token, times.arithmetic_limit))
        self.high = log2(1.3 * max(*per_token, times.reading_limit))
        knee = times.reading_limit / times.arithmetic_limit
        self.doublings = ceil(log2(max(*times.milliseconds, 1.5 * knee)))
        self.ticks = [ms for ms in TICKS if self.low < log2(ms) < self.high]

    def x(self, sequences: float) -> float:
        """Return the x coordinate of a number of sequences."""
        return LEFT + (RIGHT - LEFT) * log2(sequences) / self.doublings

    def y(self, ms: float) -> float:
        """Return the y coordinate of milliseconds per token."""
        return BOTTOM - (BOTTOM - TOP) * (log2(ms) - self.low) / (self.high - self.low)


def draw() -> str:
    """Return the picture."""
    times = StepTimes.load(DATA)
    assert times.quantization is None, "the arithmetic limit is that of bfloat16 products"
    axes = Axes(times)
    knee = times.reading_limit / times.arithmetic_limit
    drawing = Drawing(
        WIDTH,
        HEIGHT,
        "Time per token of a decode step, by the number of sequences",
        f"Below {knee:.0f} sequences the limit of a step is the time to read the weights once, "
        "however many sequences share it. Above, each token adds its arithmetic.",
    )
    drawing.text(
        18, 32, "A larger batch makes each token of a decode step cheaper", size=17, bold=True
    )
    machine = f"{times.processor} with {times.instruction_sets[0]}, {times.num_threads} threads"
    how = f"{times.model}, {times.dtype}; {machine}; torch {times.torch}"
    drawing.text(18, 52, how, "muted", size=12)
    drawing.text(18, 70, f"{times.date}: {times.command}", "muted", size=12)
    _draw_limits(drawing, axes, times)
    _draw_axes(drawing, axes)
    for line, (part, name, colour) in enumerate(SERIES):
        y = 136 + 22 * line
        per_token = {n: parts[part] / n for n, parts in times.milliseconds.items()}
        _draw_series(drawing, axes, per_token, colour)
        drawing.line([(NOTES, y - 4), (NOTES + 20, y - 4)], colour, stroke_width=1.5)
        drawing.circle(NOTES + 10, y - 4, 4, fill=colour)
        drawing.text(NOTES + 28, y, name, size=12)
    _draw_notes(drawing, times)
    return drawing.svg()


def _draw_limits(drawing: Drawing, axes: Axes, times: StepTimes) -> None:
    """Shade the times that are below the measured limits."""
    reading, arithmetic = times.reading_limit, times.arithmetic_limit
    knee, end = reading / arithmetic, 2**axes.doublings
    roof = [
        (axes.x(1), axes.y(reading)),
        (axes.x(knee), axes.y(arithmetic)),
        (axes.x(end), axes.y(arithmetic)),
    ]
    drawing.area([*roof, (RIGHT, BOTTOM), (LEFT, BOTTOM)], "panel")
    drawing.line([roof[1], (axes.x(knee), BOTTOM)], "muted", dashed=True)
    drawing.line(roof, "line", stroke_width=6)
    drawing.text(LEFT + 14, BOTTOM - 33, "faster than", "muted", size=12)
    drawing.text(LEFT + 14, BOTTOM - 16, "the measured limits", "muted", size=12)


def _draw_notes(drawing: Drawing, times: StepTimes) -> None:
    """Write the limits next to the plot."""
    reading, arithmetic = times.reading_limit, times.arithmetic_limit
    drawing.line([(NOTES, 180 - 4), (NOTES + 20, 180 - 4)], "line", stroke_width=6)
    drawing.text(NOTES + 28, 180, "limits, measured in the same run", size=12)
    for y, heading, *words in (
        (232, f"Reading limit: {reading:.1f} ms per step",
         f"{times.weight_bytes / 1e9:.2f} GB of weights at",
         f"{times.bytes_per_second / 1e9:.0f} GB/s, shared by all sequences"),
        (299, f"Arithmetic limit: {arithmetic:.1f} ms per token",
         f"{times.token_flop / 1e9:.2f} GFLOP at {times.flop_per_second / 1e9:.0f} GFLOP/s,",
         "the rate of a product of 1024 tokens"),
        (366, f"The limits meet at {reading / arithmetic:.0f} sequences",
         f"Every sequence has {times.context} tokens of", "context, which attention reads too."),
    ):  # fmt: skip
        drawing.text(NOTES, y, heading, bold=True)
        for line, text in enumerate(words, start=1):
            drawing.text(NOTES, y + 17 * line, text, "muted", size=12)


def _draw_axes(drawing: Drawing, axes: Axes) -> None:
    drawing.text(18, TOP - 10, "ms per token", "muted", size=12)
    for ms in axes.ticks:
        y = axes.y(ms)
        drawing.line([(LEFT - 5, y), (LEFT, y)], "muted")
        drawing.text(LEFT - 9, y + 4, f"{ms:g}", "muted", size=12, anchor="end")
    drawing.line([(LEFT, TOP), (LEFT, BOTTOM), (RIGHT, BOTTOM)], "muted")
    for n in (2**power for power in range(axes.doublings + 1)):
        x = axes.x(n)
        drawing.line([(x, BOTTOM), (x, BOTTOM + 5)], "muted")
        drawing.text(x, BOTTOM + 20, f"{n}", "muted", size=12, anchor="middle")
    middle = (LEFT + RIGHT) / 2
    drawing.text(middle, BOTTOM + 42, "sequences in the step", "muted", size=12, anchor="middle")


def _draw_series(drawing: Drawing, axes: Axes, times: dict[int, float], colour: str) -> None:
    """Draw milliseconds of a token by the number of sequences."""
    points = [(axes.x(n), axes.y(ms)) for n, ms in times.items()]
    drawing.line(points, colour, stroke_width=1.5)
    for x, y in points:
        drawing.circle(x, y, 4, fill=colour)
