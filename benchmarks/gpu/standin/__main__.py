"""Run benchmarks.gpu without a GPU: `python -m benchmarks.gpu.standin --out DIR --parts nano`.

The options are those of benchmarks.gpu. Kernels compute nothing, so no result is right and no time
means anything; what shows is whether the parts run to their end, and what a GPU would refuse. Exits
with 1 if a part did not run or something was refused, and with 2 where the stand-in cannot run.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.__main__ import MODULE, parse
from benchmarks.gpu.part import ROOT
from benchmarks.gpu.standin.build import Unavailable, build, torch_imports
from benchmarks.gpu.tables import table

EXPECTED = ("the profiler saw no kernel", "it is not installed")
"""Errors of rows that say nothing against the code: nothing runs, and there is no toolkit."""

UNCERTAIN = "plain torch"
"""A way of smoke whose sampler counts rows on the GPU. Here nobody counts, so it may ask for memory
of any size.
"""


def main() -> int:
    """Build the stand-in, run the parts over it, and print what was found."""
    args = parse()
    out: Path = args.out.resolve()
    with tempfile.TemporaryDirectory() as folder:
        try:
            library = build(Path(folder), torch_imports())
        except Unavailable as error:
            print(f"{MODULE}.standin: {error}", file=sys.stderr)
            return 2
        log = Path(folder) / "log"
        environment = {**os.environ, **variables(library), "STANDIN_LOG": str(log)}
        command = [sys.executable, "-m", MODULE, *sys.argv[1:]]
        status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        seen = log.read_text(errors="replace") if log.exists() else ""
    if status not in (0, 1):
        return status
    results = json.loads((out / "results.json").read_text())["results"]
    print("", *report(results, seen), sep="\n")
    refused = any(line.startswith("violation\t") for line in seen.splitlines())
    return int(refused or any(verdict(name, part) != "ran" for name, part in results.items()))


def variables(library: Path) -> dict[str, str]:
    """Return the variables with which a process uses the stand-in."""
    before = os.environ.get("LD_LIBRARY_PATH")
    places = os.pathsep.join(filter(None, [str(library.parent), before]))
    return {
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": places,
        "TRITON_LIBCUDA_PATH": str(library.parent),
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",  # cuDNN finds no GPU
    }


def verdict(name: str, part: Mapping[str, Any]) -> str:
    """Return "ran" for a part that ran to its end, or what went wrong.

    Tokens and numbers are not judged, so smoke may find all wrong and tests may fail.
    """
    errors = [error for error in errors_of(part) if error not in EXPECTED]
    if errors:
        return f"failed: {errors[0]}"
    rest = part.get("files", {}).get("the rest")
    if rest is not None:
        return f"tests: {rest['ended']}"
    compared = name == "smoke" and "control" in part
    return "ran" if part["ended"] == "done" or compared else str(part["ended"])


def errors_of(figures: Any) -> Iterator[str]:
    """Return the errors of all rows among a part's figures."""
    if isinstance(figures, dict):
        error = figures.get("error")
        by_chance = figures.get("way") == UNCERTAIN and "CUDA out of memory" in str(error)
        if isinstance(error, str) and not by_chance:
            yield error
        figures = list(figures.values())
    if isinstance(figures, list):
        for value in figures:
            yield from errors_of(value)


def report(results: Mapping[str, Any], seen: str) -> list[str]:
    """Return the lines that the command ends with.

    Args:
        results: of benchmarks.gpu.
        seen: the log of the stand-in; report.c writes it.
    """
    counts: Counter[str] = Counter()
    violations: Counter[tuple[str, ...]] = Counter()
    skipped: set[str] = set()
    for line in seen.splitlines():
        kind, *fields = line.split("\t")
        if kind == "count":
            counts[fields[0]] += int(fields[1])
        elif kind == "violation":
            violations[tuple(fields)] += 1
        elif kind == "skipped":
            skipped.add(fields[0])
    rows = [[name, verdict(name, part), f"{part['seconds']:.0f}"] for name, part in results.items()]
    text = ["# Over the stand-in", "", *table(["part", "", "host's seconds"], rows), ""]
    text += [f"- {name}: {count:,}" for name, count in sorted(counts.items())]
    text += [f"- functions that did nothing: {', '.join(sorted(skipped))}"] if skipped else []
    text += [f"- refused by a GPU: {sum(violations.values())}"]
    for (what, details, command), count in violations.most_common(20):
        text.append(f"  - {what}, {count} times: {details} ({command})")
    return text


if __name__ == "__main__":
    sys.exit(main())
