"""Draws what `nanovllm lab bench` measured: each comparison's ratio, its interval and its pairs."""

import importlib.util
import math
import statistics

from nanovllm.apps.lab.bench import MEASURES, Bench
from nanovllm.apps.lab.ratio import FASTER, NOTHING, SLOWER
from nanovllm.errors import ConfigError
from nanovllm.options.validation import check_place, writing

_COLOURS = {FASTER: "tab:green", SLOWER: "tab:red", NOTHING: "tab:gray"}


def check_plot(path: str) -> None:
    """Raise ConfigError if `draw` cannot write there, or matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("matplotlib is not installed: pip install -e '.[lab]' -c constraints.txt")
    check_place("plot", path)


def draw(found: Bench, path: str) -> None:
    """Write the picture, in the format that the file's name says.

    Raises:
        ConfigError: matplotlib cannot write the file.
    """
    from matplotlib.figure import Figure

    measures = found.measures()
    figure = Figure(figsize=(9, 1.4 + 0.6 * len(measures)), layout="constrained")
    axes = figure.subplots()
    chosen = [measure for measure in MEASURES if measure[0] in found.rounds]
    for y, (m, (workload, field, _)) in enumerate(zip(measures, chosen, strict=True)):
        pairs = [
            statistics.median(b[field] / a[field] for a, b in zip(*pair, strict=True))
            for pair in zip(*found.rounds[workload], strict=True)
        ]
        axes.plot(pairs, [y + 0.18] * len(pairs), "|", color="black", alpha=0.5)
        axes.plot([m.ratio.low, m.ratio.high], [y, y], color=_COLOURS[m.verdict], linewidth=3)
        axes.plot(m.ratio.estimate, y, "o", color=_COLOURS[m.verdict])
        if not math.isclose(m.ratio.estimate, 1):
            axes.annotate(m.verdict, (m.ratio.high, y), (6, -4), textcoords="offset points")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(measures)), [f"{m.workload}\n{m.what}" for m in measures], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel("plugin / default: less is faster; a line is a pair of processes")
    axes.set_title(found.plugin or "the default beside itself", fontsize=10)
    with writing("plot", path):
        figure.savefig(path)
