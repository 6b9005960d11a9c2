"""Part `tests`: the test suite, one process for each file, and compute-sanitizer on some files."""

import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.gpu.part import ROOT, Part, Record
from benchmarks.gpu.tables import table

COUNTS = ("passed", "failed", "errors", "skipped")
TESTS_ALONE = ("tests/worker/test_cuda_graph.py", "tests/worker/test_kv_cache.py")
"""Run first and one at a time: they check the whole GPU's memory, which other tests change."""
SANITIZED = {
    "tests/kernels/triton/test_ops.py": "bfloat16 or slots or length or negative",
    "tests/kernels/triton/test_fp8.py": "multiply or bfloat16",
    "tests/kernels/triton/test_attention.py": "test_groups or edges or length_0 or float8",
    "tests/kernels/triton/test_decode_step.py": "gather or advance",
}
"""Files that compute-sanitizer watches, and pytest's -k for each. A selection, for it is slow."""


def tests(record: Record) -> None:
    """Run the tests of TESTS_ALONE, then all others side by side, then compute-sanitizer."""
    logs = record.directory / "tests"
    logs.mkdir(exist_ok=True)
    record.figures["files"] = {}

    def run(name: str) -> tuple[str, dict[str, Any]]:
        return name, run_test_file(name, logs, record.left())

    names = test_files()
    for group, workers in (
        ([name for name in names if name in TESTS_ALONE], 1),
        ([name for name in names if name not in TESTS_ALONE], max(1, (os.cpu_count() or 1) - 2)),
    ):
        with ThreadPoolExecutor(workers) as pool:
            for job in as_completed([pool.submit(run, name) for name in group]):
                name, result = job.result()
                record.figures["files"][name] = result
                record.save()
    record.figures["sanitizer"] = {}
    with ThreadPoolExecutor(len(SANITIZED)) as pool:
        jobs = {name: pool.submit(sanitize, name, logs, record.left()) for name in SANITIZED}
        for name, found in jobs.items():
            record.figures["sanitizer"][name] = found.result()
            record.save()


def test_files() -> list[str]:
    """Return the test files: those of GPU backends first, then the longest first."""
    files = sorted(
        ROOT.glob("tests/**/test_*.py"),
        key=lambda file: ("test_gpu" not in file.name, -file.stat().st_size),
    )
    return [file.relative_to(ROOT).as_posix() for file in files]


def run_test_file(name: str, logs: Path, seconds: float) -> dict[str, Any]:
    """Return a test file's counts, its failures, and how its process ended."""
    log = logs / name.removeprefix("tests/").replace("/", "-")
    report = log.with_suffix(".xml")
    command = [sys.executable, "-m", "pytest", name, "-p", "no:cacheprovider"]
    code = run_logged([*command, f"--junitxml={report}"], log.with_suffix(".log"), seconds)
    counts: dict[str, Any] = dict.fromkeys(COUNTS, 0)
    failures = []
    if report.exists():
        for case in xml.etree.ElementTree.parse(report).iter("testcase"):
            kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
            kind = kinds[0] if kinds else "passed"
            counts[{"failure": "failed", "error": "errors"}.get(kind, kind)] += 1
            if kind in ("failure", "error"):
                found = case.find(kind)
                message = "" if found is None else found.get("message", "")
                failures.append(f"{case.get('name')}: {message:.300}")
    # pytest exits with 5 if a file has no tests for this machine.
    ended = {None: "out of time", 0: "passed", 5: "passed"}.get(code, f"exit status {code}")
    return {**counts, "ended": ended, "failures": failures}


def sanitize(name: str, logs: Path, seconds: float) -> str:
    """Run compute-sanitizer's memcheck on some tests of a file and return its summary."""
    places = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    tool = shutil.which("compute-sanitizer", path=places)
    if tool is None:
        return "compute-sanitizer is not installed"
    log = logs / f"memcheck-{Path(name).stem}.log"
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m", "pytest"]
    command += [name, "-p", "no:cacheprovider", "-k", SANITIZED[name]]
    # One allocation per tensor, so that memcheck sees a read past a tensor's end.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    code = run_logged(command, log, seconds, environment)
    lines = log.read_text(errors="replace").splitlines()
    summary = [line for line in lines if "ERROR SUMMARY" in line or line.endswith(" s")]
    last = "; ".join(line.strip("= ") for line in summary or lines[-1:])
    return f"{'out of time' if code is None else f'exit status {code}'}; {last}"


def run_logged(
    command: Sequence[str], log: Path, seconds: float, environment: dict[str, str] | None = None
) -> int | None:
    """Run a command in the repository's root with its output in `log`.

    Returns the exit status, or None after a timeout.
    """
    if seconds <= 0:
        log.write_text("no time was left\n")
        return None
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return None


def lines(figures: Mapping[str, Any], bandwidth: Mapping[str, Any]) -> list[str]:
    """Return the totals, the files that did not pass, and the sanitizer's summaries."""
    files: dict[str, Any] = figures.get("files", {})
    totals = [sum(file[count] for file in files.values()) for count in COUNTS]
    text = [f"{len(files)} files: " + ", ".join(map("{} {}".format, totals, COUNTS)) + ".", ""]
    bad = {name: file for name, file in files.items() if file["ended"] != "passed"}
    if bad:
        text += table(
            ["file", "ended", *COUNTS],
            ([name, file["ended"], *(file[c] for c in COUNTS)] for name, file in bad.items()),
        )
    for name, found in figures.get("sanitizer", {}).items():
        text.append(f"- compute-sanitizer, {name}: {found}")
    return text


PART = Part(tests, 170, "Tests", lines)
