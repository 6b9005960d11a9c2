"""A step's result: its durations, and when the tokens are read."""

from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams, demo_model
from nanovllm.core.messages import Row
from nanovllm.platform.cpu import CPU
from nanovllm.platform.cuda import CUDA
from nanovllm.worker.step_output import PendingResult, StepOutput
from nanovllm.worker.timing import StepTimer
from tests.worker.test_timing import FakeEvent


def test_a_result_has_the_durations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    timer = StepTimer(CUDA(torch.device("cuda")))
    timer.mark()
    FakeEvent.now += 1.0
    timer.mark()
    output = StepOutput(torch.tensor([7]))
    result = PendingResult(3, [Row(0, 0, 4, 1, True)], output, CPU(), timer).result()
    assert (result.step_id, result.token_ids) == (3, [[7]])
    assert (result.draft_seconds, result.seconds) == pytest.approx((2.5, 3.5))


@pytest.mark.parametrize("kept", [True, False])
def test_tokens_that_the_step_writes_to_the_host_are_read_when_it_is_done(
    monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """Symptom: they are copied at launch, before the device has written them."""
    tokens = torch.tensor([0])

    class Event:
        def __init__(self, *, enable_timing: bool) -> None: ...

        def record(self) -> None: ...

        def synchronize(self) -> None:
            if not tokens.item():
                tokens.fill_(7)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    output = StepOutput(tokens, on_host=True)
    pending = PendingResult(0, [Row(0, 0, 4, 1, True)], output, CUDA(torch.device("cuda")))
    if kept:
        pending.keep()
        tokens.fill_(9)  # a later step
    assert pending.result().token_ids == [[7]]


@pytest.mark.parametrize("speculative", [None, {"method": "ngram"}])
def test_only_speculation_is_timed(
    make_llm: Any, monkeypatch: pytest.MonkeyPatch, speculative: dict[str, str] | None
) -> None:
    made: list[StepTimer] = []
    init = StepTimer.__init__
    monkeypatch.setattr(
        StepTimer, "__init__", lambda self, platform: (made.append(self), init(self, platform))[1]
    )
    llm: LLM = make_llm(demo_model.MODEL, max_model_len=64, speculative_config=speculative)
    llm.generate("A block", SamplingParams(max_tokens=3), use_tqdm=False)
    assert bool(made) == (speculative is not None)
