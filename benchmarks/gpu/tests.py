"""Part `kernels`: tests of kernels, GPU backends and graphs, and others that only a GPU can run."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.part import ROOT, Part, Record, table

COUNTS = ("passed", "failed", "errors", "skipped")
KERNEL_TESTS = (
    "kernels/triton/test_*.py",
    "attention/test_gpu_*.py",
    "graphs/test_*graph*.py",
    "graphs/test_fused_*.py",
    "worker/test_warm_up.py",
    "worker/test_kv_cache.py",
)
"""Patterns of the files of part `kernels`, below tests/. Files with tests that only a GPU can run
are in it as well."""
ONLY_CUDA = re.compile(r"@NEEDS_CUDA|skipif\(\s*not torch\.cuda")
"""Marks a test that only a GPU can run."""
COMPILE_TESTS = "kernels/triton/test_*compile.py"
"""They compile for GPUs that are not there, so they need none."""
ALONE = "tests/graphs/test_cuda_graph.py::test_cuda_graphs_are_used_and_freed"
"""A test that reads the whole GPU's memory, which other processes change. It runs last, with
nothing beside it.
"""
PYTEST_OPTIONS = ("-p", "no:cacheprovider", "-p", "benchmarks.gpu.pytest_plugin")
_MOST_WORKERS = 12
"""Processes of pytest-xdist, at most. Most of the time of kernel tests is compiling."""
_COUNTING_SECONDS = 3
"""Of a part's time, what is kept for the counts."""


def kernels(record: Record) -> None:
    """Run the tests until the time is over."""
    run_files(record, kernel_files())


def kernel_files() -> list[str]:
    """Return the files of part `kernels`."""
    compiling = test_files(COMPILE_TESTS)
    named = test_files(*KERNEL_TESTS)
    return [
        name
        for name in test_files("**/test_*.py")
        if name not in compiling
        and (name in named or ONLY_CUDA.search((ROOT / name).read_text(encoding="utf-8")))
    ]


def test_files(*patterns: str) -> list[str]:
    """Return the test files that match, the longest first."""
    files = {file for pattern in patterns for file in (ROOT / "tests").glob(pattern)}
    ordered = sorted(files, key=lambda file: (-file.stat().st_size, file))
    return [file.relative_to(ROOT).as_posix() for file in ordered]


def run_files(record: Record, names: Sequence[str]) -> None:
    """Run test files in one pytest, then the one that has to run alone."""
    record.figures["files"] = {}
    side_by_side = ["--continue-on-collection-errors", "--deselect", ALONE]
    if importlib.util.find_spec("xdist") is not None:
        workers = min(_MOST_WORKERS, max(1, (os.cpu_count() or 1) - 2))
        side_by_side += ["-n", str(workers), "--dist", "worksteal"]
    run_pytest(record, [*side_by_side, *names])
    if ALONE.partition("::")[0] in names and "the rest" not in record.figures["files"]:
        run_pytest(record, [ALONE])  # some time is left


def run_pytest(record: Record, arguments: Sequence[str]) -> None:
    """Run pytest; add the counts of each file, and its failures, to the figure "files".

    When the record's time is over pytest is killed; what is counted are the tests that had ended.
    """
    log, report = record.scratch / "pytest.log", record.scratch / "pytest.json"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", *PYTEST_OPTIONS, f"--results={report}", *arguments]
    code = run_logged(command, log, record.left() - _COUNTING_SECONDS)
    rows = [json.loads(row) for row in report.read_text().splitlines()] if report.exists() else []
    files = record.figures["files"]
    for row in rows:
        name, _, test = row["name"].partition("::")
        new = {**dict.fromkeys(COUNTS, 0), "ended": "passed", "failures": []}
        file = files.setdefault(name, new)
        file[row["outcome"]] += 1
        if row["outcome"] in ("failed", "errors"):
            file["ended"] = "failed"
            file["failures"].append(f"{test}: {row['message']}")
    # pytest exits with 1 after failures, and with 5 if no test is for this machine.
    if code not in (0, 1, 5):
        ended = "out of time" if code is None else f"exit status {code}"
        last = log.read_text(errors="replace").splitlines()[-5:]
        files["the rest"] = {**dict.fromkeys(COUNTS, 0), "ended": ended, "failures": last}
    record.save()
    for name, file in files.items():
        if file["ended"] == "failed":
            print(f"--- {name}", *file["failures"], sep="\n", flush=True)


def run_logged(command: Sequence[str], log: Path, seconds: float) -> int | None:
    """Run a command in the repository's root with its output in `log`.

    Returns the exit status, or None after a timeout.
    """
    if seconds <= 0:
        log.write_text("no time was left\n", encoding="utf-8")
        return None
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return None


def lines(figures: Mapping[str, Any], bandwidth: Mapping[str, Any]) -> list[str]:
    """Return the totals, and the files that did not pass with the first of their failures."""
    files: dict[str, Any] = figures.get("files", {})
    totals = [sum(file[count] for file in files.values()) for count in COUNTS]
    text = [f"{len(files)} files: " + ", ".join(map("{} {}".format, totals, COUNTS)) + ".", ""]
    bad = {name: file for name, file in files.items() if file["ended"] != "passed"}
    if bad:
        rows = [
            [
                name,
                file["ended"],
                *(file[count] for count in COUNTS),
                "; ".join(file["failures"][:3]),
            ]
            for name, file in sorted(bad.items())
        ]
        text += table(["file", "ended", *COUNTS, "first failures"], rows)
    return text


PART = Part(kernels, 150, "Tests of kernels, backends and graphs", lines)
