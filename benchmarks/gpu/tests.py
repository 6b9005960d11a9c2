"""Parts `kernels`, `suite` and `eager`: test files, a process for each, with and without graphs."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.gpu.packages import missing_imports
from benchmarks.gpu.part import ROOT, Part, Record
from benchmarks.gpu.tables import table

COUNTS = ("passed", "failed", "errors", "skipped")
KERNEL_TESTS = (
    "kernels/triton/test_*.py",
    "attention/test_gpu_*.py",
    "steps/test_*graph*.py",
    "steps/test_fused_*.py",
    "worker/test_warm_up.py",
    "worker/test_kv_cache.py",
)
"""Patterns of the files of part `kernels`, below tests/."""
COMPILE_TESTS = "kernels/triton/test_*compile.py"
"""They compile for GPUs that are not there, so they need none."""
EAGER_TESTS = ("test_*.py", "engine/test_*.py", "attention/test_gpu_*.py")
"""Patterns of the files that run once more without CUDA graphs."""
ALONE = {"tests/steps/test_cuda_graph.py": "freed"}
"""Files with a test that reads the whole GPU's memory, which other processes change, and pytest's
-k for that test. It runs first, with nothing beside it.
"""
PYTEST_OPTIONS = ("-p", "no:cacheprovider", "-p", "benchmarks.gpu.pytest_plugin")
_WORKERS = 3
"""Processes of pytest-xdist for a file of kernel tests: most of their time is compiling."""


def kernels(record: Record) -> None:
    """Run the tests of kernels, GPU backends and graphs."""
    options = []
    if importlib.util.find_spec("xdist") is not None:
        options = ["-n", str(_WORKERS), "--dist", "worksteal"]
    run_files(record, kernel_files(), options)


def suite(record: Record) -> None:
    """Run all other tests."""
    kernel_tests = kernel_files()
    run_files(record, [name for name in test_files("**/test_*.py") if name not in kernel_tests])


def eager(record: Record) -> None:
    """Run tests of whole engines without CUDA graphs."""
    run_files(record, test_files(*EAGER_TESTS), ["-p", "benchmarks.gpu.no_graphs"])


def kernel_files() -> list[str]:
    """Return the files of part `kernels`."""
    compiling = test_files(COMPILE_TESTS)
    return [name for name in test_files(*KERNEL_TESTS) if name not in compiling]


def test_files(*patterns: str) -> list[str]:
    """Return the test files that match, the longest first."""
    files = {file for pattern in patterns for file in (ROOT / "tests").glob(pattern)}
    ordered = sorted(files, key=lambda file: (-file.stat().st_size, file))
    return [file.relative_to(ROOT).as_posix() for file in ordered]


def run_files(record: Record, names: Iterable[str], options: Sequence[str] = ()) -> None:
    """Run test files side by side until the time is over; leave out those that cannot be imported.

    Args:
        options: of pytest.
    """
    logs = record.scratch / "tests"
    logs.mkdir(exist_ok=True)
    files = record.figures["files"] = {}
    jobs: list[tuple[str, list[str]]] = []
    for name in names:
        missing = missing_imports(ROOT / name)
        if missing:
            reason = f"needs {', '.join(sorted(missing))}"
            files[name] = {**dict.fromkeys(COUNTS, 0), "ended": "left out", "failures": [reason]}
        elif name in ALONE:
            result = run_file(name, logs, record.left(), ["-k", ALONE[name]])
            files[f"{name} -k {ALONE[name]}"] = result
            jobs.append((name, [*options, "-k", f"not {ALONE[name]}"]))
        else:
            jobs.append((name, [*options]))
        record.save()

    def run(job: tuple[str, list[str]]) -> tuple[str, dict[str, Any]]:
        name, arguments = job
        return name, run_file(name, logs, record.left(), arguments)

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 2)) as pool:
        for done in as_completed([pool.submit(run, job) for job in jobs]):
            name, result = done.result()
            files[name] = result
            record.save()
            if result["ended"] != "passed":
                print(f"--- {name}: {result['ended']}", *result["failures"], sep="\n", flush=True)


def run_file(name: str, logs: Path, seconds: float, options: Sequence[str] = ()) -> dict[str, Any]:
    """Return a test file's counts, its failures, and how its process ended.

    After `seconds` pytest is killed; the counts are then those of the tests that had ended.
    """
    log = logs / f"{name.removeprefix('tests/').replace('/', '-')}.log"
    report = log.with_suffix(".json")
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", *PYTEST_OPTIONS, f"--results={report}", name]
    code = run_logged([*command, *options], log, seconds)
    rows = map(json.loads, report.read_text().splitlines()) if report.exists() else ()
    counts: dict[str, Any] = dict.fromkeys(COUNTS, 0)
    failures = []
    for row in rows:
        counts[row["outcome"]] += 1
        if row["outcome"] in ("failed", "errors"):
            failures.append(f"{row['name'].rpartition('::')[2]}: {row['message']}")
    # pytest exits with 5 if a file has no tests for this machine.
    ended = {None: "out of time", 0: "passed", 5: "passed"}.get(code, f"exit status {code}")
    if ended.startswith("exit") and not failures:
        failures = log.read_text(errors="replace").splitlines()[-5:]
    return {**counts, "ended": ended, "failures": failures}


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


KERNELS = Part(kernels, 90, "Tests of kernels, backends and graphs", lines)
SUITE = Part(suite, 190, "All other tests", lines)
EAGER = Part(eager, 80, "Tests of engines without CUDA graphs", lines)
