"""Run benchmarks.gpu without a GPU: `python -m benchmarks.gpu.standin --out DIR --parts nano`.

The options are those of benchmarks.gpu; parts that are tests are refused. Kernels compute nothing,
so no result is right and no time means anything; what shows is whether the parts run to their end,
and what a GPU would refuse. Exits with 1 if a part did not run or something was refused, and with 2
where the stand-in cannot run.
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

TESTS = ("kernels", "suite", "eager")
"""Parts that are tests: they judge numbers, and what a failure prints has any size here."""
NUMBERS = ("smoke", "speculation")
"""Parts whose host takes numbers of kernels for sizes and places: how many rows a sampler looks at
again, how many drafts were accepted. Here they are what the memory held, so an engine of such a
part may fail by chance. The error is shown, but does not count.
"""


def main() -> int:
    """Build the stand-in, run the parts over it, and print what was found."""
    args = parse()
    tests = [name for name in args.parts if name in TESTS]
    if tests:
        print(f"{MODULE}.standin: tests cannot run over it: {', '.join(tests)}", file=sys.stderr)
        return 2
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
    return int(
        refused or not all(verdict(name, part).startswith("ran") for name, part in results.items())
    )


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
    """Return "ran", and perhaps more, for a part that ran to its end, or what went wrong.

    Tokens are not judged, so smoke may find all wrong.
    """
    ended = part["ended"] == "done" or (name == "smoke" and "control" in part)
    errors = [error for error in errors_of(part) if error not in EXPECTED]
    if errors:
        by_chance = ended and name in NUMBERS
        return f"{'ran; perhaps by chance' if by_chance else 'failed'}: {errors[0]}"
    return "ran" if ended else str(part["ended"])


def errors_of(figures: Any) -> Iterator[str]:
    """Return the errors of all rows among a part's figures."""
    if isinstance(figures, dict):
        if isinstance(figures.get("error"), str):
            yield figures["error"]
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
