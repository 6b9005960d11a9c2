"""What steps cost is measured in turns. The durations of a step are the host's on a CPU, on CUDA
those between events on the device.
"""

import time
from typing import ClassVar

import pytest
import torch

from nanovllm.platform.cpu import CPU
from nanovllm.platform.cuda import CUDA
from nanovllm.worker import timing
from nanovllm.worker.timing import StepTimer


def test_a_slow_moment_meets_no_size_in_all_its_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: sizes that were measured in a slow moment got no drafts for a long time."""
    now, num_runs = 0.0, 0

    def run(size: int) -> None:
        nonlocal now, num_runs
        num_runs += 1
        now += size * (5.0 if 3 <= num_runs <= 5 else 1.0)

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    sizes = (1, 2, 4, 8)
    found = timing.measure_seconds(run, sizes, CPU())
    assert found == tuple((size, float(size)) for size in sizes)


class FakeEvent:
    """Marks the time of a device that is slower than the host."""

    now: ClassVar[float] = 0.0

    def __init__(self, *, enable_timing: bool = False) -> None:
        self.is_timed = enable_timing
        self.time: float | None = None

    def record(self) -> None:
        FakeEvent.now += 2.5
        self.time = FakeEvent.now

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert self.is_timed
        assert end.is_timed
        assert self.time is not None
        assert end.time is not None
        return 1000 * (end.time - self.time)  # milliseconds


def test_on_a_cpu_the_host_is_timed() -> None:
    timer = StepTimer(CPU())
    time.sleep(0.002)
    timer.mark()
    timer.mark()
    first, second = timer.seconds()
    assert first >= 0.002
    assert 0 <= second < first


def test_on_cuda_the_device_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: the durations are those of launches, so the controller takes any step for cheap."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    timer = StepTimer(CUDA(torch.device("cuda")))
    timer.mark()
    FakeEvent.now += 1.0
    timer.mark()
    assert timer.seconds() == pytest.approx([2.5, 3.5])
