"""Part `sanitizer`: compute-sanitizer's memcheck and racecheck on tests of the kernels."""

import os
import re
import shutil
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.gpu.part import Part, Record
from benchmarks.gpu.tables import table
from benchmarks.gpu.tests import PYTEST_OPTIONS, kernel_files, run_logged

TOOLS = ("memcheck", "racecheck")
SELECTED = {
    "test_ops.py": "bfloat16 or slots or length or negative",
    "test_fp8.py": "multiply or bfloat16",
    "test_int4.py": "multiply and bfloat16",
    "test_attention.py": "test_groups or edges or length_0 or float8",
    "test_decode_step.py": "gather or advance",
    "test_sampling.py": "depend or stride or distribution",
    "test_ngram.py": "not compile",
}
"""By the name of a test file of Triton kernels: pytest's -k. A selection, because the tools slow a
kernel down; for other files it is "bfloat16".
"""


def sanitized_files() -> list[str]:
    """Return the test files of kernels."""
    return [name for name in kernel_files() if name.startswith("tests/kernels/triton/")]


def sanitizer(record: Record) -> None:
    """Run each tool on each file, all side by side."""
    places = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    program = shutil.which("compute-sanitizer", path=places)
    if program is None:
        record.add("rows", {"tool": "compute-sanitizer", "error": "it is not installed"})
        return

    def run(tool: str, name: str) -> dict[str, Any]:
        log = record.scratch / f"{tool}-{Path(name).stem}.log"
        return {"tool": tool, "file": name, **sanitize(program, tool, name, log, record.left())}

    names = sanitized_files()
    with ThreadPoolExecutor(len(TOOLS) * len(names)) as pool:
        jobs = [pool.submit(run, tool, name) for tool in TOOLS for name in names]
        for job in as_completed(jobs):
            record.add("rows", job.result())


def sanitize(program: str, tool: str, name: str, log: Path, seconds: float) -> dict[str, Any]:
    """Run a tool on tests of a file; return how it ended and its summary."""
    command = [program, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", "pytest"]
    command += [*PYTEST_OPTIONS, name, "-k", SELECTED.get(Path(name).name, "bfloat16")]
    # One allocation per tensor, so that memcheck sees a read past a tensor's end.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    code = run_logged(command, log, seconds, environment)
    found = log.read_text(errors="replace").splitlines()
    summary = [line for line in found if "SUMMARY" in line or re.search(r" in [\d.]+s", line)]
    last = "; ".join(line.strip("= ") for line in summary[-3:] or found[-1:])
    ends = {None: "out of time", 0: "clean", 5: "no test selected", 9: "errors"}
    ended = ends.get(code, f"exit status {code}")
    if code == 9:
        print(f"--- {tool} {name}", *found[:80], sep="\n", flush=True)
    return {"ended": ended, "summary": last}


def lines(figures: Mapping[str, Any], bandwidth: Mapping[str, Any]) -> list[str]:
    """Return a table of how each run ended."""
    rows = [
        [
            row["tool"],
            row.get("file", ""),
            row.get("ended", "–"),
            row.get("summary", row.get("error")),
        ]
        for row in figures.get("rows", [])
    ]
    return table(["tool", "tests", "ended", "summary"], rows)


PART = Part(sanitizer, 100, "compute-sanitizer", lines)
