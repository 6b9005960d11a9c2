"""roofline.svg: the time of a token in a decode step on a CPU, by the number of sequences.

The figures are in docs/pictures/roofline.json, with the processor on which they were measured.
"""

import json
from math import log2
from pathlib import Path
from typing import Any

from benchmarks.shapes import CONFIGS, SMALL, weight_bytes
from tools.pictures.svg import Drawing

DATA = Path(__file__).parent.parent.parent / "docs" / "pictures" / "roofline.json"
WIDTH, HEIGHT = 880, 462
LEFT, RIGHT, TOP, BOTTOM = 58, 580, 88, 400
NOTES = 612
"""Left edge of what is written beside the plot."""
SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MILLISECONDS = (1, 2, 5, 10, 20, 50)
COLOURS = ("blue", "orange", "green")


def draw() -> str:
    """Return the picture."""
    data: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    step_bytes = weight_bytes(CONFIGS[SMALL])
    token_flop = step_bytes  # two operations for each weight, and two bytes
    reading = 1e3 * step_bytes / data["bytes_per_second"]
    arithmetic = 1e3 * token_flop / data["flop_per_second"]
    knee = reading / arithmetic
    drawing = Drawing(
        WIDTH,
        HEIGHT,
        "Time per token of a decode step, by the number of sequences",
        f"Below {knee:.0f} sequences a step takes the time to read the weights once, however many "
        "sequences share it. Above, each token adds its arithmetic.",
    )
    drawing.text(
        18, 32, "A larger batch makes each token of a decode step cheaper", size=17, bold=True
    )
    drawing.text(18, 52, f"{data['model']}, {data['part']}; {data['processor']}", "muted", size=12)
    _draw_limits(drawing, reading, arithmetic)
    _draw_axes(drawing)
    for line, ((name, times), colour) in enumerate(
        zip(data["milliseconds"].items(), COLOURS, strict=True)
    ):
        _draw_series(drawing, {int(n): ms / int(n) for n, ms in times.items()}, colour)
        y = 114 + 22 * line
        drawing.line([(NOTES, y - 4), (NOTES + 20, y - 4)], colour, stroke_width=1.5)
        drawing.circle(NOTES + 10, y - 4, 4, fill=colour)
        drawing.text(NOTES + 28, y, name, size=12)
    _draw_notes(drawing, data, reading, arithmetic)
    return drawing.svg()


def _draw_limits(drawing: Drawing, reading: float, arithmetic: float) -> None:
    """Shade the times that no program can reach.

    Args:
        drawing: the picture.
        reading: milliseconds of a step.
        arithmetic: milliseconds of a token.
    """
    knee = reading / arithmetic
    roof = [(_x(1), _y(reading)), (_x(knee), _y(arithmetic)), (_x(256), _y(arithmetic))]
    drawing.area([*roof, (_x(256), BOTTOM), (_x(1), BOTTOM)], "panel")
    drawing.line([(_x(knee), _y(arithmetic)), (_x(knee), BOTTOM)], "muted", dashed=True)
    drawing.line(roof, "line", stroke_width=6)
    drawing.text(_x(1) + 14, _y(1.75), "faster than", "muted", size=12)
    drawing.text(_x(1) + 14, _y(1.75) + 17, "the hardware allows", "muted", size=12)


def _draw_notes(drawing: Drawing, data: dict[str, Any], reading: float, arithmetic: float) -> None:
    """Write what the limits are, beside the plot."""
    gigabytes = reading * data["bytes_per_second"] / 1e12
    gigaflop = arithmetic * data["flop_per_second"] / 1e12
    drawing.line([(NOTES, 180 - 4), (NOTES + 20, 180 - 4)], "line", stroke_width=6)
    drawing.text(NOTES + 28, 180, "limit of the processor", size=12)
    for y, heading, *words in (
        (232, f"Reading limit: {reading:.1f} ms per step", f"{gigabytes:.2f} GB of weights at",
         f"{data['bytes_per_second'] / 1e9:.0f} GB/s, shared by all sequences"),
        (299, f"Arithmetic limit: {arithmetic:.1f} ms per token",
         f"{gigaflop:.2f} GFLOP at {data['flop_per_second'] / 1e9:.0f} GFLOP/s"),
        (349, f"The limits meet at {reading / arithmetic:.0f} sequences",
         "With fewer, one more sequence", "adds almost no time to a step."),
    ):  # fmt: skip
        drawing.text(NOTES, y, heading, bold=True)
        for line, text in enumerate(words, start=1):
            drawing.text(NOTES, y + 17 * line, text, "muted", size=12)


def _draw_axes(drawing: Drawing) -> None:
    drawing.text(18, TOP - 8, "ms per token", "muted", size=12)
    for ms in MILLISECONDS:
        drawing.line([(LEFT - 5, _y(ms)), (LEFT, _y(ms))], "muted")
        drawing.text(LEFT - 9, _y(ms) + 4, f"{ms}", "muted", size=12, anchor="end")
    drawing.line([(LEFT, TOP), (LEFT, BOTTOM), (RIGHT, BOTTOM)], "muted")
    for n in SEQUENCES:
        drawing.line([(_x(n), BOTTOM), (_x(n), BOTTOM + 5)], "muted")
        drawing.text(_x(n), BOTTOM + 20, f"{n}", "muted", size=12, anchor="middle")
    middle = (LEFT + RIGHT) / 2
    drawing.text(middle, BOTTOM + 42, "sequences in the step", "muted", size=12, anchor="middle")


def _draw_series(drawing: Drawing, times: dict[int, float], colour: str) -> None:
    """Draw milliseconds of a token by the number of sequences."""
    points = [(_x(n), _y(ms)) for n, ms in times.items()]
    drawing.line(points, colour, stroke_width=1.5)
    for x, y in points:
        drawing.circle(x, y, 4, fill=colour)


def _x(sequences: float) -> float:
    return LEFT + (RIGHT - LEFT) * log2(sequences) / log2(SEQUENCES[-1])


def _y(ms: float) -> float:
    low, high = log2(0.8), log2(60)
    return BOTTOM - (BOTTOM - TOP) * (log2(ms) - low) / (high - low)
