"""Fills the tables of docs/exactness.md with results: `python -m tools.exactness`.

The results are the JSON files in docs/benchmarks/exactness: of `nanovllm prove --output`, and of
`python -m tests.prove.each_layer`.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tools.made_tables import PART, table

PAGE = Path(__file__).parent.parent / "docs" / "exactness.md"
RESULTS = PAGE.parent / "benchmarks" / "exactness"
PROOFS = "nanovllm", "vllm", "transformers", "llamacpp"
"""Files of the results of engines, in the order of the table's columns."""
SERVERS = "nanovllm-server", "llamacpp-server"


def page() -> str:
    """Return the text of the page with new tables."""
    return PART.sub(
        lambda part: f"{part[1]}\n{PARTS[part[2]]()}\n\n{part[3]}", PAGE.read_text("utf-8")
    )


def read(name: str) -> Any:
    """Return the results in a file."""
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def models() -> str:
    """Return a table of the models with which `nanovllm prove` ran."""
    rows = []
    for entry in read("models"):
        different = sum(verdict["num_different"] for verdict in entry["verdicts"])
        not_shown = [each["way"] for each in entry["verdicts"] if not _happened(each)]
        number = str(len(entry["verdicts"]) - len(not_shown))
        if different:
            number += f", but **{different} answers differ**"
        # The others are what no run of this table has.
        untried = [text.partition(":")[0] for text in entry["not_tried"] if ": " in text]
        untried = [name for name in untried if name != "LoRA" and name not in not_shown]
        untried += not_shown
        rows.append((entry["model"], entry["layers"], number, "; ".join(untried)))
    return table(("Model", "Layers and weights", "Ways, same bits", "Not tried"), rows)


def engines() -> str:
    """Return a table of what installed engines answered, way by way, and what did not run."""
    return _answers(PROOFS)


def servers() -> str:
    """Return a table of what servers answered."""
    return _answers(SERVERS)


def _answers(names: tuple[str, ...]) -> str:
    columns: dict[str, dict[str, str]] = {}
    links: dict[str, list[str]] = {}
    below: list[str] = []
    for name in names:
        proof = read(name)
        for setting in dict.fromkeys(each["setting"] for each in proof["verdicts"]):
            if setting in ("", "batch-invariant mode"):
                engine = _engine(proof, setting)
                columns.setdefault(engine, {}).update(_cells(proof, setting))
                links.setdefault(engine, []).append(f"[{name}](benchmarks/exactness/{name}.json)")
        reasons: dict[str, list[str]] = {}
        for text in proof["not_tried"] if proof["peer_options"] else ():
            way, _, reason = text.partition(": ")
            reasons.setdefault(reason, []).append(way)
        for reason, untried in reasons.items():
            below.append(f"- {proof['engine']} did not run, {'; '.join(untried)}: `{reason}`")
    ways = list(dict.fromkeys(way for cells in columns.values() for way in cells))
    rows = [(way, *(cells.get(way, "") for cells in columns.values())) for way in ways]
    rows.append(("raw results", *(", ".join(links[engine]) for engine in columns)))
    return "\n".join([table(("", *columns), rows), *([""] if below else []), *below])


def _engine(proof: dict[str, Any], setting: str) -> str:
    name = re.sub(r" \(.*\)|, torch.*| at .*", "", proof["engine"])
    kind = "GGUF Q4_1" if proof["model"].endswith(".gguf") else "bfloat16"
    return ", ".join(filter(None, (name, kind, setting)))


def _cells(proof: dict[str, Any], setting: str) -> Iterator[tuple[str, str]]:
    """Yield (way, how many answers differ, and of those how many in tokens) where it happened."""
    for each in proof["verdicts"]:
        if each["setting"] == setting and _happened(each):
            way = re.sub(r"^chunks of \d+ tokens?", "chunks", each["way"])
            different, tokens = each["num_different"], each["num_different_tokens"]
            yield way, f"{different} of {each['num_answers']}" + f" ({tokens})" * (different > 0)


def _happened(verdict: dict[str, Any]) -> bool:
    """Return whether anything happened of what a way is about; "not shown" is not in old files."""
    return verdict["status"] != "not shown" and not verdict["evidence"].startswith("0 ")


PARTS: dict[str, Callable[[], str]] = {
    "models": models,
    "engines": engines,
    "servers": servers,
}
"""The text to put after each mark `<!-- made: ... -->` in the page."""

if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
