"""benchmarks.busy runs engines next to busy processes, and ends these."""

import os
import time
from pathlib import Path

import pytest

from benchmarks import busy
from benchmarks.versus import Engine


def test_rows_are_ratios_to_the_engine_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "engine"
    answer = "echo ready to be measured 2"
    path.write_text(f"#!/bin/sh\n{answer}\nwhile read line; do {answer}; done\n")
    path.chmod(0o755)
    engine = Engine(f"vllm={path}", "", "dummy")
    try:
        busy.measure([engine], ["decode1"], [0, 1], 1)
    finally:
        engine.stop()
    *_, alone, one = capsys.readouterr().out.splitlines()
    assert alone == "| decode1 | 0 | vllm | 2.00 | 1.00 | 1.00 |"
    assert one == "| decode1 | 1 | vllm | 2.00 | 1.00 | 1.00 |"


def test_busy_processes_have_sessions_of_their_own_and_end() -> None:
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
    with busy.beside(2):
        deadline = time.monotonic() + 10  # a process has no command line until it has begun
        while len(found := others() - before - {os.getsid(0)}) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(found) == 2
    assert others() <= before
