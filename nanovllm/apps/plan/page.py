"""A plan's answers as a table, and as one HTML page that explains itself."""

import html
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from nanovllm.apps.plan.options import Objective
from nanovllm.options.validation import listed

Outcome = dict[str, Any]


class Figure(NamedTuple):
    """A figure of an outcome, as a table and a plot show it."""

    name: str
    about: str
    value: Callable[[Outcome], float]
    form: str = ".2f"


def _percentile(name: str, which: str) -> Callable[[Outcome], float]:
    return lambda outcome: float(outcome[name][which])


FIGURES = [
    Figure("TTFT p50", "seconds to the first token, median", _percentile("ttft", "p50"), ".3f"),
    Figure("TTFT p99", "the same, of the slowest hundredth", _percentile("ttft", "p99"), ".3f"),
    Figure("TPOT p50", "seconds a token behind it, median", _percentile("tpot", "p50"), ".4f"),
    Figure("TPOT p99", "the same, of the slowest hundredth", _percentile("tpot", "p99"), ".4f"),
    Figure("whole p50", "seconds of a whole request", _percentile("e2e", "p50")),
    Figure("good", "share of requests within the objective", lambda o: o["good_share"], ".1%"),
    Figure("goodput", "such requests a second", lambda o: o["goodput"]),
    Figure("tokens/s", "output tokens a second", lambda o: o["output_tokens_per_second"], ".0f"),
    Figure("busy", "share of the time in which a replica computes", lambda o: o["busy"], ".0%"),
    Figure("KV used", "mean share of the KV pool in use", lambda o: o["kv_used"], ".0%"),
    Figure("hits", "share of prompts' tokens found in a cache", lambda o: o["cached_share"], ".0%"),
    Figure("preempted", "times a sequence lost its KV", lambda o: o["preemptions"], ".0f"),
]


def name_of(outcome: Outcome) -> str:
    """Return the options of an outcome in words."""
    options = [f"{name}={value}" for name, value in outcome["options"].items()]
    return listed(options, 4) if options else "as calibrated"


def table(outcomes: list[Outcome], objective: Objective) -> str:
    """Return the outcomes as lines for a terminal."""
    rows = [["options", "replicas", *(figure.name for figure in FIGURES)]]
    for outcome in outcomes:
        figures = (format(figure.value(outcome), figure.form) for figure in FIGURES)
        rows.append([name_of(outcome), str(outcome["replicas"]), *figures])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
    first = outcomes[0]
    lines.append(
        f"{first['requests']} requests in {first['seconds']:.0f} s. Good: TTFT up to "
        f"{objective.slo_ttft:g} s and {objective.slo_tpot:g} s a token, "
        f"{objective.slo_share:.1%} of the requests."
    )
    for name in dict.fromkeys(map(name_of, outcomes)):
        own = [outcome for outcome in outcomes if name_of(outcome) == name]
        good = [outcome["replicas"] for outcome in own if outcome["meets_slo"]]
        found = f"{min(good)} replicas meet the objective" if good else _missed(own[-1])
        lines.append(f"{name}: {found}.")
    return "\n".join(lines) + "\n"


def _missed(outcome: Outcome) -> str:
    return (
        f"{outcome['replicas']} replicas do not meet the objective: {outcome['good_share']:.1%} of "
        "the requests are good; try more replicas, or a looser objective"
    )


_STYLE = (
    "body{font:16px/1.5 system-ui;max-width:60em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;font-size:14px}td,th{padding:.2em .6em;text-align:right}"
    "tr{border-bottom:1px solid #ccc}figure{display:inline-block;margin:1em 1em 1em 0}"
    "figcaption{font-size:14px}text{font:12px system-ui}"
)
_COLOURS = ("#1f5fbf", "#bf5f1f")
_WIDTH, _HEIGHT, _LEFT = 260, 140, 50


def page(outcomes: list[Outcome], objective: Objective) -> str:
    """Return the outcomes as a page without scripts."""
    heads = "".join(f"<th title='{f.about}'>{f.name}</th>" for f in FIGURES)
    rows = "".join(
        f"<tr><td>{html.escape(name_of(o))}</td><td>{o['replicas']}</td>"
        + "".join(f"<td>{f.value(o):{f.form}}</td>" for f in FIGURES)
        + "</tr>"
        for o in outcomes
    )
    plots = "".join(_plot(figure, outcomes) for figure in FIGURES)
    legend = "".join(f"<li><b>{f.name}</b>: {f.about}</li>" for f in FIGURES)
    words = html.escape(table(outcomes, objective).splitlines()[-1])
    return (
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>nanovllm lab plan</title>"
        f"<style>{_STYLE}</style><h1>What users would feel</h1><p>{words}</p>"
        "<p>Each row is a run of the engine's own scheduler in virtual time; how long its steps "
        "take was measured. It does not see the network, failures, or what else runs on a "
        f"machine.</p><table><tr><th>options</th><th>replicas</th>{heads}</tr>{rows}</table>"
        f"{plots}<ul>{legend}</ul><details><summary>As JSON</summary><pre>"
        f"{html.escape(json.dumps(outcomes, indent=1))}</pre></details></html>"
    )


def _plot(figure: Figure, outcomes: list[Outcome]) -> str:
    """Return a plot of a figure over the number of replicas, a line for each set of options."""
    highest = max([figure.value(outcome) for outcome in outcomes]) or 1.0
    counts = sorted({outcome["replicas"] for outcome in outcomes})
    span = max(counts[-1] - counts[0], 1)
    marks = []
    for number, name in enumerate(dict.fromkeys(map(name_of, outcomes))):
        colour = _COLOURS[number % len(_COLOURS)]
        points = [
            (
                _LEFT + (outcome["replicas"] - counts[0]) / span * _WIDTH,
                10 + (1 - figure.value(outcome) / highest) * _HEIGHT,
            )
            for outcome in outcomes
            if name_of(outcome) == name
        ]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        marks.append(f"<polyline points='{line}' fill='none' stroke='{colour}'/>")
        marks += [f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3' fill='{colour}'/>" for x, y in points]
    return (
        f"<figure><svg width='{_WIDTH + _LEFT + 20}' height='{_HEIGHT + 40}'>"
        f"<text x='0' y='16'>{highest:{figure.form}}</text><text x='0' y='{_HEIGHT + 10}'>0</text>"
        f"<path d='M{_LEFT} 10v{_HEIGHT}h{_WIDTH}' fill='none' stroke='#888'/>"
        f"<text x='{_LEFT}' y='{_HEIGHT + 30}'>{counts[0]}</text>"
        f"<text x='{_LEFT + _WIDTH - 20}' y='{_HEIGHT + 30}'>{counts[-1]} replicas</text>"
        f"{''.join(marks)}</svg><figcaption>{figure.name}: {figure.about}</figcaption></figure>"
    )
