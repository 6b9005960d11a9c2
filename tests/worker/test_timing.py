"""What steps cost is measured in turns."""

import pytest
import torch

from nanovllm.worker import timing


def test_a_slow_moment_meets_no_size_in_all_its_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: sizes that were measured in a slow moment got no drafts for a long time."""
    now, num_runs = 0.0, 0

    def run(size: int) -> None:
        nonlocal now, num_runs
        num_runs += 1
        now += size * (5.0 if 3 <= num_runs <= 5 else 1.0)

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    sizes = (1, 2, 4, 8)
    found = timing.measure_seconds(run, sizes, torch.device("cpu"))
    assert found == tuple((size, float(size)) for size in sizes)
