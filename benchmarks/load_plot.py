"""Draw a load that `nanovllm bench serve --save-result FILE` wrote, as a picture in SVG.

It shows throughput and requests over time, and how latencies spread. Measures nothing.
"""

import argparse
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm.loadtest.load_report import TITLES, percentile
from tools.svg import Drawing

WIDTH, HEIGHT = 800, 480
BINS = 100
"""Pieces of the time axis."""
LEFT, RIGHT, TOP, MIDDLE = 64.0, 736.0, 88.0, 232.0
"""Pixels: the edges of the upper panel."""
LOWER, BOTTOM, PANEL, GAP = 300.0, 410.0, 152.0, 36.0
"""Pixels: the top and bottom of the lower panels, the width of one, and the space between two."""


class Request(NamedTuple):
    """A completed request. Times are seconds after the load's begin."""

    start: float
    token_times: list[float]
    end: float
    num_output_tokens: int


def draw(result: dict[str, Any]) -> str:
    """Return the picture of what `--save-result` wrote."""
    title = f"{result['model_id']} under load"
    drawing = Drawing(WIDTH, HEIGHT, title, "Throughput over time, and latencies by percentile.")
    drawing.text(16, 30, title, size=17, bold=True)
    drawing.text(
        16,
        50,
        f"{result['completed']} requests of {len(result['errors'])} completed in "
        f"{result['duration']:.1f} s; {result['output_throughput']:.0f} output tokens/s; "
        f"at most {result['max_concurrent_requests']} at once",
        "muted",
    )
    requests = _completed(result)
    _draw_time(drawing, requests, result["duration"])
    for number, (name, title) in enumerate(TITLES.items()):
        left = 34 + number * (PANEL + GAP)
        times = sorted(time for request in requests for time in _milliseconds(request, name))
        limit = result["goodput_limits_ms"].get(name)
        _draw_spread(drawing, left, f"{name.upper()}: {title}", times, limit)
    drawing.text(
        16, HEIGHT - 14, "lower row: share of requests within so many ms", "muted", size=11
    )
    return drawing.svg()


def _completed(result: dict[str, Any]) -> list[Request]:
    names = ("errors", "start_times", "ttfts", "itls", "latencies", "output_lens")
    rows = zip(*(result[name] for name in names), strict=True)
    return [
        Request(start, list(itertools.accumulate(itls, initial=start + ttft)), start + whole, count)
        for error, start, ttft, itls, whole, count in rows
        if not error
    ]


def _milliseconds(request: Request, name: str) -> list[float]:
    """Return a request's latencies of a name of TITLES."""
    start, token_times, end, count = request
    seconds = {
        "ttft": [token_times[0] - start],
        "tpot": [(end - token_times[0]) / (count - 1)] if count > 1 else [],
        "itl": [after - before for before, after in itertools.pairwise(token_times)],
        "e2el": [end - start],
    }
    return [1000 * value for value in seconds[name]]


def _draw_time(drawing: Drawing, requests: Sequence[Request], seconds: float) -> None:
    """Draw output tokens a second as an area, and requests at once as a line."""
    width = max(seconds, 1e-9) / BINS
    tokens, running = [0.0] * BINS, [0.0] * BINS
    for request in requests:
        each = request.num_output_tokens / len(request.token_times)
        for time in request.token_times:
            tokens[_bin(time, width)] += each / width
        for place in range(_bin(request.start, width), _bin(request.end, width) + 1):
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
    drawing.text(RIGHT, MIDDLE + 16, f"{seconds:.1f} s", "muted", size=11, anchor="end")


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


def main() -> None:
    """Read a load's result and write its picture."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load_plot", description=__doc__)
    parser.add_argument("result", type=Path, help="a JSON file")
    parser.add_argument("-o", "--output", type=Path, help="default: beside the JSON file")
    args = parser.parse_args()
    output = args.output or args.result.with_suffix(".svg")
    output.write_text(draw(json.loads(args.result.read_text(encoding="utf-8"))), encoding="utf-8")
    print(output)


if __name__ == "__main__":
    main()
