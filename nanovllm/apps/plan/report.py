"""What a plan answers: what requests got, as a table and as one HTML page that explains itself."""

import html
import io
import json
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from nanovllm.apps.plan.options import Objective
from nanovllm.apps.plan.replica import Answering, Replica
from nanovllm.core.sequence import Sequence
from nanovllm.options.validation import listed

Outcome = dict[str, Any]


class Answers:
    """Collects what the requests of a run got."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.ttft, self.tpot, self.e2e = array("d"), array("d"), array("d")
        self.num_good = self.num_tokens = self.num_cached = self.num_prompt = 0
        self.num_blocks = self.num_preemptions = self.num_replicas = 0
        self.busy_seconds = self.block_seconds = self.end = 0.0

    def add(self, answering: Answering, seq: Sequence, end: float) -> None:
        """Note a request that has ended."""
        first, arrival = answering.first or 0.0, answering.request.arrival
        tpot = (end - first) / max(seq.num_output_tokens - 1, 1)
        self.ttft.append(first - arrival)
        self.e2e.append(end - arrival)
        if seq.num_output_tokens > 1:
            self.tpot.append(tpot)
        good = first - arrival <= self.objective.slo_ttft and tpot <= self.objective.slo_tpot
        self.num_good += good
        self.num_tokens += seq.num_output_tokens
        self.num_cached += seq.num_cached_tokens or 0
        self.num_prompt += seq.num_prompt_tokens
        self.end = max(self.end, end)

    def add_replica(self, replica: Replica) -> None:
        """Note a replica at the end of the run."""
        self.num_replicas += 1
        self.num_blocks += len(replica.scheduler.block_manager.blocks)
        self.num_preemptions += replica.scheduler.stats.num_preemptions
        self.busy_seconds += replica.busy_seconds
        self.block_seconds += replica.block_seconds

    def merge(self, other: "Answers") -> None:
        """Add what another part of the run has noted."""
        end = max(self.end, other.end)
        for name, value in vars(other).items():
            if name != "objective":
                setattr(self, name, getattr(self, name) + value)
        self.end = end

    def outcome(self) -> Outcome:
        """Return the answers as plain values; times are in seconds."""
        num_requests = len(self.ttft)
        seconds = max(self.end, 1e-9)
        return {
            "requests": num_requests,
            "seconds": seconds,
            "ttft": _percentiles(self.ttft),
            "tpot": _percentiles(self.tpot),
            "e2e": _percentiles(self.e2e),
            "good_share": self.num_good / num_requests,
            "meets_slo": self.num_good >= self.objective.slo_share * num_requests,
            "goodput": self.num_good / seconds,
            "output_tokens_per_second": self.num_tokens / seconds,
            "busy": self.busy_seconds / seconds / self.num_replicas,
            "kv_used": self.block_seconds / seconds / self.num_blocks,
            "cached_share": self.num_cached / self.num_prompt,
            "preemptions": self.num_preemptions,
        }


def _percentiles(values: "array[float]") -> dict[str, float]:
    found = np.quantile(np.frombuffer(values), (0.5, 0.9, 0.99)) if values else np.zeros(3)
    return dict(zip(("p50", "p90", "p99"), found.tolist(), strict=True))


class Figure(NamedTuple):
    """A figure of an outcome, as a table and a plot show it."""

    name: str
    about: str
    value: Callable[[Outcome], float]
    form: str


FIGURES = [
    Figure("TTFT p50", "seconds to the first token, median", lambda o: o["ttft"]["p50"], ".3f"),
    Figure("TTFT p99", "the same, of the slowest hundredth", lambda o: o["ttft"]["p99"], ".3f"),
    Figure("TPOT p50", "seconds per further token, median", lambda o: o["tpot"]["p50"], ".4f"),
    Figure("TPOT p99", "the same, of the slowest hundredth", lambda o: o["tpot"]["p99"], ".4f"),
    Figure("whole p50", "seconds of a whole request, median", lambda o: o["e2e"]["p50"], ".2f"),
    Figure("good", "share of requests within the objective", lambda o: o["good_share"], ".1%"),
    Figure("goodput", "such requests a second", lambda o: o["goodput"], ".2f"),
    Figure("tokens/s", "output tokens a second", lambda o: o["output_tokens_per_second"], ".0f"),
    Figure("busy", "share of the time in which replicas compute", lambda o: o["busy"], ".0%"),
    Figure("KV used", "mean share of the KV pool in use", lambda o: o["kv_used"], ".0%"),
    Figure("hits", "share of prompts' tokens found in a cache", lambda o: o["cached_share"], ".0%"),
    Figure("preempted", "times a sequence lost its KV", lambda o: o["preemptions"], ".0f"),
]


def _rows(outcomes: list[Outcome]) -> list[list[str]]:
    rows = [["options", "replicas", *(figure.name for figure in FIGURES)]]
    for outcome in outcomes:
        figures = (format(figure.value(outcome), figure.form) for figure in FIGURES)
        rows.append([_name(outcome), str(outcome["replicas"]), *figures])
    return rows


def _name(outcome: Outcome) -> str:
    options = [f"{name}={value}" for name, value in outcome["options"].items()]
    return listed(options, 4) if options else "as calibrated"


def _by_options(outcomes: list[Outcome]) -> dict[str, list[Outcome]]:
    names = dict.fromkeys(map(_name, outcomes))
    return {name: [each for each in outcomes if _name(each) == name] for name in names}


def table(outcomes: list[Outcome], objective: Objective) -> str:
    """Return the outcomes as lines for a terminal."""
    rows = _rows(outcomes)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
    lines.append(
        f"{outcomes[0]['requests']} requests in {outcomes[0]['seconds']:.0f} s. Good: TTFT up to "
        f"{objective.slo_ttft:g} s and {objective.slo_tpot:g} s a token, "
        f"{objective.slo_share:.1%} of the requests."
    )
    for name, own in _by_options(outcomes).items():
        good = [outcome["replicas"] for outcome in own if outcome["meets_slo"]]
        if good:
            found = f"enough replicas for the objective: {min(good)}"
        else:
            found = (
                f"too few replicas for the objective: {own[-1]['replicas']}, with "
                f"{own[-1]['good_share']:.1%} of the requests good; try more, or a looser objective"
            )
        lines.append(f"{name}: {found}.")
    return "\n".join(lines) + "\n"


def page(outcomes: list[Outcome], objective: Objective) -> str:
    """Return the outcomes as a page without scripts."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(14, 9), layout="constrained")
    for axes, figure in zip(canvas.subplots(3, 4).flat, FIGURES, strict=True):
        for name, own in _by_options(outcomes).items():
            replicas, values = [o["replicas"] for o in own], [figure.value(o) for o in own]
            axes.plot(replicas, values, marker="o", label=name)
        axes.set_title(figure.about, fontsize=9)
        axes.set(xlabel="replicas", ylabel=figure.name, ylim=(0, 1.1 * axes.get_ylim()[1]))
    canvas.legend(*axes.get_legend_handles_labels(), loc="outside lower center")
    drawn = io.StringIO()
    canvas.savefig(drawn, format="svg")
    head, *rows = (map(html.escape, row) for row in _rows(outcomes))
    cells = "".join(f"<tr><td>{'<td>'.join(row)}" for row in rows)
    lines = table(outcomes, objective).splitlines()[1 + len(outcomes) :]
    words = "<br>".join(map(html.escape, lines))
    return (
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>nanovllm lab plan</title>"
        "<style>body{font:16px system-ui;margin:2em}td,th{padding:.3em;text-align:right}</style>"
        f"<h1>What users would feel</h1><p>{words}</p><p>Each row is a run of the engine's own "
        "scheduler in virtual time; how long its steps take was measured. It does not see the "
        f"network, failures, or what else runs on a machine.</p><table><tr><th>{'<th>'.join(head)}"
        f"{cells}</table>{drawn.getvalue()}<details><summary>As JSON</summary><pre>"
        f"{html.escape(json.dumps(outcomes, indent=1))}</pre></details></html>"
    )
