"""Draws a load's report as SVG: throughput and requests over time, and how latencies spread.

Knows no server and measures nothing.
"""

import math
from collections.abc import Sequence

from nanovllm.loadtest.load_report import TITLES, Report, percentile
from nanovllm.loadtest.svg import Drawing

WIDTH, HEIGHT = 800, 480
BINS = 100
"""Pieces of the time axis."""
LEFT, RIGHT, TOP, MIDDLE = 64.0, 736.0, 88.0, 232.0
"""Pixels: the edges of the upper panel."""
LOWER, BOTTOM, PANEL, GAP = 300.0, 410.0, 152.0, 36.0
"""Pixels: the top and bottom of the lower panels, the width of one, and the space between two."""


def draw(report: Report) -> str:
    """Return the picture."""
    title = f"{report.plan.model} under load"
    drawing = Drawing(WIDTH, HEIGHT, title, "Throughput over time, and latencies by percentile.")
    drawing.text(16, 30, title, size=17, bold=True)
    rate = report.num_output_tokens / max(report.seconds, 1e-9)
    drawing.text(
        16,
        50,
        f"{len(report.completed)} requests of {len(report.measured)} completed in "
        f"{report.seconds:.1f} s; {rate:.0f} output tokens/s; at most {report.peak} at once",
        "muted",
    )
    _draw_time(drawing, report)
    limits = report.plan.limits()
    for number, (name, title) in enumerate(TITLES.items()):
        left = 34 + number * (PANEL + GAP)
        times = sorted(1000 * seconds for seconds in report.times[name])
        _draw_spread(drawing, left, f"{name.upper()}: {title}", times, limits.get(name))
    drawing.text(
        16, HEIGHT - 14, "lower row: share of requests within so many ms", "muted", size=11
    )
    return drawing.svg()


def _draw_time(drawing: Drawing, report: Report) -> None:
    """Draw output tokens a second as an area, and requests at once as a line."""
    begin = min((item.start for item in report.measured), default=0.0)
    width = max(report.seconds, 1e-9) / BINS
    tokens, running = [0.0] * BINS, [0.0] * BINS
    for item in report.completed:
        each = item.num_output_tokens / len(item.token_times)
        for time in item.token_times:
            tokens[_bin(time - begin, width)] += each / width
        for place in range(_bin(item.start - begin, width), _bin(item.end - begin, width) + 1):
            running[place] += 1
    most, peak = max(max(tokens), 1.0), max(max(running), 1.0)
    step = (RIGHT - LEFT) / BINS

    def points(values: Sequence[float], top: float) -> list[tuple[float, float]]:
        return [
            (LEFT + step * (number + 0.5), MIDDLE - (MIDDLE - TOP) * value / top)
            for number, value in enumerate(values)
        ]

    area = points(tokens, most)
    drawing.area([(area[0][0], MIDDLE), *area, (area[-1][0], MIDDLE)], "blue-pale")
    drawing.line(area, "blue", stroke_width=1.5)
    drawing.line(points(running, peak), "orange", stroke_width=1.5)
    drawing.line([(LEFT, MIDDLE), (RIGHT, MIDDLE)], "line")
    drawing.text(LEFT, TOP - 10, f"output tokens/s, up to {most:.0f}", "blue", size=12)
    drawing.text(
        RIGHT, TOP - 10, f"requests at once, up to {peak:.0f}", "orange", size=12, anchor="end"
    )
    drawing.text(LEFT, MIDDLE + 16, "0 s", "muted", size=11)
    drawing.text(RIGHT, MIDDLE + 16, f"{report.seconds:.1f} s", "muted", size=11, anchor="end")


def _draw_spread(
    drawing: Drawing, left: float, title: str, times: Sequence[float], limit: float | None
) -> None:
    """Draw which share of the times is below each number of milliseconds, up to the 99.5th
    percentile; a dashed line is the limit of goodput.
    """
    drawing.text(left, LOWER - 14, title, size=11, bold=True)
    drawing.line([(left, LOWER), (left, BOTTOM), (left + PANEL, BOTTOM)], "line")
    longest = max(percentile(times, 99.5), limit or 0.0, 1e-6)
    points = []
    for number in range(BINS):
        percent = 99.5 * number / (BINS - 1)
        across = left + PANEL * percentile(times, percent) / longest
        points.append((across, BOTTOM - (BOTTOM - LOWER) * percent / 100))
    drawing.line(points, "green", stroke_width=1.5)
    if limit is not None:
        across = left + PANEL * limit / longest
        drawing.line([(across, LOWER), (across, BOTTOM)], "orange", dashed=True)
    drawing.text(left, BOTTOM + 15, "0", "muted", size=11)
    drawing.text(left + PANEL, BOTTOM + 15, f"{longest:.3g}", "muted", size=11, anchor="end")
    median, last = percentile(times, 50), percentile(times, 99)
    drawing.text(left, BOTTOM + 33, f"p50 {median:.3g}, p99 {last:.3g}", size=11)


def _bin(seconds: float, width: float) -> int:
    """Return the piece of the time axis in which a moment lies."""
    return min(BINS - 1, max(0, math.floor(seconds / width)))
