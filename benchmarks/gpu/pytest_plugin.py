"""A plugin of pytest: writes each result as it comes, for whoever has to end pytest before its end.

After an error of CUDA, a process can run nothing more on the GPU, so a worker of pytest-xdist then
ends; another one takes its place, and the test that it was about to run is reported as a crash.

It also sees to it that `tests` is this repository's. tests/ has no __init__.py, and Python prefers
a package that has one, wherever it lies.
"""

import importlib.util
import json
import os
import sys
import types
from pathlib import Path

import pytest

from benchmarks.gpu.part import ROOT

_DIRECTORY = str(ROOT / "tests")
_spec = importlib.util.find_spec("tests")
if _spec is None or _DIRECTORY not in (_spec.submodule_search_locations or ()):
    _module = types.ModuleType("tests")
    _module.__path__ = [_DIRECTORY]
    sys.modules["tests"] = _module


class Results:
    """Appends a line of JSON to a file for each test: its name, its outcome and why it failed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            is_error = report.failed and report.when != "call"
            self._write(report, "errors" if is_error else report.outcome)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(report, "errors")

    def _write(self, report: pytest.TestReport | pytest.CollectReport, outcome: str) -> None:
        message = ""
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = str(report.longrepr if crash is None else crash.message)
        row = {"name": report.nodeid, "outcome": outcome, "message": message[:300]}
        with self._path.open("a") as file:
            print(json.dumps(row), file=file)


class LostContext:
    """Ends a worker that can use the GPU no more."""

    def __init__(self) -> None:
        self._is_lost = False

    def pytest_exception_interact(self, call: pytest.CallInfo[object]) -> None:
        error = call.excinfo.value if call.excinfo is not None else None
        self._is_lost |= type(error).__name__ == "AcceleratorError"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> None:
        if self._is_lost:
            os._exit(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --results."""
    parser.addoption("--results", type=Path, help="file for a line of JSON for each test")


def pytest_configure(config: pytest.Config) -> None:
    """Write results in the process that has them all, not in pytest-xdist's workers."""
    path = config.getoption("results")
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(LostContext())
    elif path is not None:
        config.pluginmanager.register(Results(path))
