"""The parts in order, and the page of tables that is made of their figures.

Imports no torch and needs no GPU.
"""

from collections.abc import Mapping
from typing import Any

from benchmarks.gpu import attention, bandwidth, models, nano, peers, single, tests
from benchmarks.gpu.part import Part
from benchmarks.gpu.tables import table

PARTS: dict[str, Part] = {
    "tests": tests.PART,
    "bandwidth": bandwidth.PART,
    "attention": attention.PART,
    "nano": nano.PART,
    "single": single.PART,
    "models": models.PART,
    "peers": peers.PART,
}


def page(machine: Mapping[str, str], command: str, results: Mapping[str, Any]) -> str:
    """Return the page: machine, versions, command, and a section for each part that ran.

    Args:
        machine: what is known of the machine, by name; has "GPU" and "date".
        results: by part, the figures that it recorded; `ended` says how it ended.
    """
    rates = results.get("bandwidth", {})
    text = [f"# {machine['GPU']}, {machine['date']}", ""]
    text += table(["", ""], machine.items())
    text += ["", "```sh", command, "```", ""]
    text += table(
        ["part", "ended", "seconds"],
        ([name, part["ended"], f"{part['seconds']:.0f}"] for name, part in results.items()),
    )
    for name, part in PARTS.items():
        figures = results.get(name)
        if figures is not None and any(key not in ("ended", "seconds") for key in figures):
            text += ["", f"## {part.title}", "", *part.lines(figures, rates)]
    return "\n".join(text) + "\n"
