"""A step's durations: on a CPU the host's, on CUDA those between events on the device."""

import time
from typing import Any, ClassVar

import pytest
import torch

from nanovllm import LLM, SamplingParams, demo_model
from nanovllm.scheduler.messages import Row
from nanovllm.worker.step_output import PendingResult, Step, StepOutput, StepTimer


class FakeEvent:
    """Marks the time of a device that is slower than the host."""

    now: ClassVar[float] = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.time: float | None = None

    def record(self) -> None:
        FakeEvent.now += 2.5
        self.time = FakeEvent.now

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert self.time is not None
        assert end.time is not None
        return 1000 * (end.time - self.time)  # milliseconds


def test_on_a_cpu_the_host_is_timed() -> None:
    timer = StepTimer(torch.device("cpu"))
    time.sleep(0.002)
    timer.mark()
    timer.mark()
    first, second = timer.seconds()
    assert first >= 0.002
    assert 0 <= second < first


def test_on_cuda_the_device_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: the durations are those of launches, so the controller takes any step for cheap."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    timer = StepTimer(torch.device("cuda"))
    timer.mark()
    FakeEvent.now += 1.0
    timer.mark()
    assert timer.seconds() == pytest.approx([2.5, 3.5])


def test_a_result_has_the_durations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    timer = StepTimer(torch.device("cuda"))
    timer.mark()
    FakeEvent.now += 1.0
    timer.mark()
    step = Step(3, [Row(0, 0, 4, 1, True)], [0], timer)
    result = PendingResult(step, StepOutput(torch.tensor([7]), None, [])).result()
    assert (result.step_id, result.token_ids) == (3, [[7]])
    assert (result.draft_seconds, result.seconds) == pytest.approx((2.5, 3.5))


@pytest.mark.parametrize("speculative", [None, {"method": "ngram"}])
def test_only_speculation_is_timed(
    make_llm: Any, monkeypatch: pytest.MonkeyPatch, speculative: dict[str, str] | None
) -> None:
    made: list[StepTimer] = []
    init = StepTimer.__init__
    monkeypatch.setattr(
        StepTimer, "__init__", lambda self, device: (made.append(self), init(self, device))[1]
    )
    llm: LLM = make_llm(demo_model.MODEL, max_model_len=64, speculative_config=speculative)
    llm.generate("A block", SamplingParams(max_tokens=3), use_tqdm=False)
    assert bool(made) == (speculative is not None)
