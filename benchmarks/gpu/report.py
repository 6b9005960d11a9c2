"""The parts in order, and the page of tables that is made of their figures.

    python -m benchmarks.gpu.report results.json [results.json ...] -o docs/benchmarks/h200.md

Imports no torch and needs no GPU.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import attention, bandwidth, models, nano, peers, single, smoke, step, tests
from benchmarks.gpu.part import Part, table

PARTS: dict[str, Part] = {
    "smoke": smoke.PART,
    "kernels": tests.PART,
    "bandwidth": bandwidth.PART,
    "single": single.PART,
    "nano": nano.PART,
    "attention": attention.PART,
    "step": step.PART,
    "models": models.PART,
    "peers": peers.PART,
}
"""The most valuable first. docs/benchmarks/README.md divides them into calls."""

_ENDING = ("ended", "seconds", "limit")


def page(calls: Sequence[Mapping[str, Any]]) -> str:
    """Return the page of one or more calls: each with its machine, versions, command and figures.

    Args:
        calls: as `benchmarks.gpu` writes them to results.json.
    """
    text = [f"# {calls[0]['machine']['GPU']}", ""]
    text += ["Written by `python -m benchmarks.gpu.report`. docs/benchmarks/README.md explains it."]
    for number, call in enumerate(calls, 1):
        results = call["results"]
        text += ["", f"## Call {number}: {', '.join(results) or 'nothing yet'}", ""]
        text += ["```sh", call["command"], "```", ""]
        text += table(["", ""], call["machine"].items())
        text += ["", *table(["part", "ended", "seconds", "limit"], map(_times, results.items()))]
        for name in results:
            text += section(name, results)
    return "\n".join(text) + "\n"


def section(name: str, results: Mapping[str, Any]) -> list[str]:
    """Return the lines of one part; none if it recorded nothing."""
    figures = {key: value for key, value in results[name].items() if key not in _ENDING}
    left_out, log = figures.pop("left_out", []), figures.pop("log", [])
    text: list[str] = []
    if figures:
        try:
            text += PARTS[name].lines(figures, results.get("bandwidth", {}))
        except KeyError as missing:  # the part was cut before it had this figure
            text.append(f"Not enough was recorded for a table: there is no {missing}.")
    if left_out:
        text += ["", f"Left out, because the time was over: {', '.join(left_out)}."]
    if log:
        text += ["", "The log:", "", *(f"- {message}" for message in log)]
    return ["", f"### {PARTS[name].title}", "", *text] if text else []


def _times(item: tuple[str, Mapping[str, Any]]) -> list[str]:
    name, part = item
    return [name, part["ended"], f"{part['seconds']:.0f}", f"{part['limit']:.0f}"]


def main(argv: Sequence[str] | None = None) -> None:
    """Write one page of the results of several calls."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.report", description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, help="results.json of each call")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the page")
    args = parser.parse_args(argv)
    calls = [json.loads(path.read_text(encoding="utf-8")) for path in args.results]
    args.output.write_text(page(calls), encoding="utf-8")


if __name__ == "__main__":
    main()
