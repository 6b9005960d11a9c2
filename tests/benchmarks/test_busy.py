"""benchmarks.busy runs engines in conditions, and leaves the machine as it was."""

import os
import time
from pathlib import Path

import pytest

from benchmarks import busy
from benchmarks.versus import Engine


@pytest.fixture
def engine(tmp_path: Path):
    """Return an engine whose seconds are the number of cores that it may use."""
    path = tmp_path / "engine"
    answer = "echo ready to be measured $(env -u OMP_NUM_THREADS nproc)"
    path.write_text(f"#!/bin/sh\n{answer}\nwhile read line; do {answer}; done\n")
    path.chmod(0o755)
    engine = Engine(f"vllm={path}", "", "dummy")
    yield engine
    engine.stop()


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]


def test_one_core(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    cores = len(os.sched_getaffinity(0))
    busy.measure([engine], ["decode1"], ["alone", "1 core"], 1)
    *_, alone, one = rows(capsys.readouterr().out)
    assert alone == ["decode1", "alone", "vllm", f"{cores:.2f}", "1.00", "1.00"]
    assert one == ["decode1", "1 core", "vllm", "1.00", f"{1 / cores:.2f}", "1.00"]
    assert all(len(os.sched_getaffinity(pid)) == cores for pid in engine.processes())


def test_busy_processes_have_sessions_of_their_own_and_end(engine: Engine) -> None:
    def others() -> set[int]:
        """Return the sessions of the busy processes."""
        found = set()
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if busy.BUSY.encode() in path.read_bytes():
                    found.add(os.getsid(int(path.parent.name)))
            except OSError:  # it has ended
                pass
        return found

    before = others()
    with busy.CONDITIONS["2 busy"](engine.processes()):
        deadline = time.monotonic() + 10  # a process has no command line until it has begun
        while len(found := others() - before - {os.getsid(0)}) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(found) == 2
    assert others() <= before


@pytest.mark.skipif(
    not any(os.access(busy.CPU_GROUPS / path, os.W_OK) for path in ("cpu", "cgroup.procs")),
    reason="no right to make a control group",
)
def test_limit(engine: Engine) -> None:
    (pid,) = engine.processes()
    group = Path(f"/proc/{pid}/cgroup")
    with busy.CONDITIONS["1.5 cores"]([pid]):
        assert "nanovllm-busy" in group.read_text()
    assert "nanovllm-busy" not in group.read_text()
