"""Processes that share a directory, and processes that are killed while they write."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanovllm.features.tiers.directory import DirectoryStore
from tests.tiers import churn
from tests.tiers.helpers import NAMESPACE, files, holds, key, place, write

LIMIT = churn.NUMBERS * sum(churn.SIZES) // 2
"""Room for half of the entries."""


def start(root: Path, seed: int, seconds: float, writes: float) -> subprocess.Popen[str]:
    """Start a process of churn.py; return when it has written."""
    arguments = (str(item) for item in (root, LIMIT, seed, seconds, writes))
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.tiers.churn", *arguments],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    return process


@pytest.mark.long
def test_processes_write_read_and_evict_side_by_side(tmp_path):
    """Two processes and this one remove what the others read."""
    processes = [start(tmp_path, seed, 1.0, 0.5) for seed in range(2)]
    store = DirectoryStore(tmp_path, LIMIT, NAMESPACE)
    most = 0
    while any(process.poll() is None for process in processes):
        number = random.randrange(churn.NUMBERS)
        write(store, number, churn.SIZES)
        holds(store, number, churn.SIZES)
        sizes = []
        for file in files(tmp_path):
            try:
                sizes.append(file.stat().st_size)
            except FileNotFoundError:
                continue
        most = max(most, sum(sizes))
    printed = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], printed
    assert all(int(text) > 0 for text in printed)
    assert most <= LIMIT * 1.25  # each sees what the others wrote at its next scan
    store.settle()
    held = [number for number in range(churn.NUMBERS) if holds(store, number, churn.SIZES)]
    assert len(held) == len(files(tmp_path)) > 10


@pytest.mark.long
def test_killed_writers_leave_whole_entries_or_nothing(tmp_path):
    rng, torn, seed = random.Random(0), 0, 0
    while torn < 3:
        process = start(tmp_path, seed, 60, 1.0)
        time.sleep(rng.uniform(0.0, 0.01))
        deadline = time.monotonic() + 1
        while seed % 2 and not temporary(tmp_path) and time.monotonic() < deadline:
            pass
        process.kill()
        process.communicate()
        torn += len(temporary(tmp_path))
        store = DirectoryStore(tmp_path, LIMIT, NAMESPACE)
        for number in range(churn.NUMBERS):
            exists = place(tmp_path, number).exists()
            assert holds(store, number, churn.SIZES) == store.has(key(number)) == exists
        write(store, 1000 + seed)
        store.settle()
        assert not temporary(tmp_path)
        seed += 1
        assert seed < 40, "no process was killed within a write"


def temporary(root: Path) -> list[str]:
    """Return the files that are being written, or were when their process died."""
    return [name for name in os.listdir(root / NAMESPACE / "rank0") if name.startswith("tmp-")]
