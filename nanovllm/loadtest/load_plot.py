"""Draws a load's report: throughput and requests over time, and how latencies spread.

The only file that needs matplotlib. Knows no server and measures nothing.
"""

import io
import itertools

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanovllm.loadtest.load_report import TITLES, Report, percentile

BINS = 100
"""Pieces of the time axis."""


def draw(report: Report, kind: str) -> bytes:
    """Return a picture, as a file of a kind such as "svg"."""
    figure = Figure(figsize=(10, 6), layout="constrained")
    rate = report.num_output_tokens / max(report.seconds, 1e-9)
    figure.suptitle(
        f"{report.plan.model} under load: {len(report.completed)} requests of "
        f"{len(report.measured)} completed in {report.seconds:.1f} s; {rate:.0f} output tokens/s",
        parse_math=False,
    )
    panels = figure.subplot_mosaic([["time"] * len(TITLES), list(TITLES)])
    _draw_time(panels["time"], report)
    limits = report.plan.limits()
    for name, title in TITLES.items():
        axes, limit = panels[name], limits.get(name, 0.0)
        axes.set_title(f"{name.upper()}\n{title}", fontsize="medium")
        times = sorted(1000 * seconds for seconds in report.times[name])
        if times:
            axes.ecdf(times)
        if limit:
            axes.axvline(limit, color="C1", linestyle="dashed")
        axes.set_xlim(0, 1.02 * max(percentile(times, 99.5), limit, 1e-6))
        axes.set_xlabel("ms")
    panels[next(iter(TITLES))].set_ylabel("share of requests")
    file = io.BytesIO()
    figure.savefig(file, format=kind)
    return file.getvalue()


def _draw_time(axes: Axes, report: Report) -> None:
    """Draw output tokens a second as an area, and requests at once as a line."""
    begin = min((item.start for item in report.measured), default=0.0)
    width = max(report.seconds, 1e-9) / BINS
    times, tokens = [], []
    for item in report.completed:
        times += [time - begin for time in item.token_times]
        tokens += [item.num_output_tokens / len(item.token_times) / width] * len(item.token_times)
    axes.hist(
        times,
        BINS,
        range=(0, BINS * width),
        weights=tokens,
        histtype="stepfilled",
        alpha=0.5,
    )
    axes.set(xlabel="s", ylabel="output tokens/s")
    changes = [(item.start - begin, 1) for item in report.completed]
    changes += [(item.end - begin, -1) for item in report.completed]
    moments, steps = zip((0.0, 0), *sorted(changes), strict=True)
    running = axes.twinx()
    running.step(moments, list(itertools.accumulate(steps)), color="C1", where="post")
    running.set_ylim(0)
    running.set_ylabel("requests at once", color="C1")
