"""Acceptance: which of a step's samples become a row's tokens, and which errors count. Durations:
on a CPU the host's, on CUDA those between events on the device.
"""

import time
from typing import Any, ClassVar

import pytest
import torch

from nanovllm import LLM, SamplingParams, demo_model
from nanovllm.layers.sampler import NO_TOKEN
from nanovllm.scheduler.messages import Row, RowDetails, StepResult
from nanovllm.worker.sampling_rows import GatheredLogprobs, SampledLogprobs
from nanovllm.worker.step_output import (
    NO_DISTRIBUTION,
    PendingResult,
    PromptLogprobs,
    Step,
    StepOutput,
    StepTimer,
)

FAILED = "a logits processor failed: ValueError: no"
UNUSED = 99
"""What the table holds behind a row's last draft."""


def row(seq_id: int, num_drafts: int) -> Row:
    return Row(seq_id, seq_id, 4, 1 + num_drafts, samples=True, num_draft_tokens=num_drafts)


def accept(
    drafts: list[int], sampled: list[int], errors: dict[int, str] | None = None
) -> tuple[list[int], str | None]:
    """Return the tokens and the error of a step of one row."""
    output = StepOutput(
        torch.tensor(sampled), None, [], errors or {}, torch.tensor([*drafts, UNUSED])
    )
    step = Step(7, [row(0, len(drafts))])
    result = PendingResult(step, output).result()
    assert result.step_id == 7
    (tokens,) = result.token_ids
    found = result.details.get(0, RowDetails())
    assert found.num_draft_tokens == len(drafts)
    return tokens, found.error


@pytest.mark.parametrize(
    ("drafts", "sampled", "expected"),
    [
        ([], [5], [5]),
        ([5], [5, 6], [5, 6]),
        ([5], [4, 6], [4]),
        ([5, 6, 7], [5, 6, 7, 8], [5, 6, 7, 8]),
        ([5, 6, 7], [5, 6, 9, 8], [5, 6, 9]),
        ([5, 6, 7], [5, 9, 7, 8], [5, 9]),  # a draft behind a wrong one is right by chance
        ([5, 6, 7], [9, 6, 7, 8], [9]),
        ([0, 0], [0, 0, 0], [0, 0, 0]),
        ([5], [5, UNUSED], [5, UNUSED]),
    ],
)
def test_drafts_are_accepted_up_to_the_first_that_differs(
    drafts: list[int], sampled: list[int], expected: list[int]
) -> None:
    assert accept(drafts, sampled) == (expected, None)


def test_row_whose_first_sample_has_no_distribution_fails() -> None:
    assert accept([], [NO_TOKEN]) == ([], NO_DISTRIBUTION)
    assert accept([5, 6], [NO_TOKEN, 6, 7]) == ([], NO_DISTRIBUTION)


def test_failure_behind_accepted_drafts_comes_with_the_next_step() -> None:
    assert accept([5, 6], [5, NO_TOKEN, 7]) == ([5], None)
    assert accept([5, 6], [5, 6, NO_TOKEN]) == ([5, 6], None)
    assert accept([5, 6], [5, 6, 7], errors={1: FAILED}) == ([5], None)


def test_failure_behind_a_wrong_draft_does_not_count() -> None:
    assert accept([5, 6], [9, NO_TOKEN, 7]) == ([9], None)
    assert accept([5, 6], [9, 6, 7], errors={1: FAILED, 2: FAILED}) == ([9], None)


def test_reason_of_a_processor_comes_before_that_of_the_logits() -> None:
    assert accept([5], [NO_TOKEN, 6], errors={0: FAILED}) == ([], FAILED)


def test_each_row_has_its_own_samples_and_errors() -> None:
    rows = [
        row(0, 2),
        Row(1, 1, 0, 3, samples=False),
        row(2, 0),
        row(3, 1),
        row(4, 1),
    ]
    output = StepOutput(
        torch.tensor([5, 6, 7, 8, 9, 4, 3, 3]),
        None,
        [],
        {6: FAILED},
        torch.tensor([5, 9, UNUSED, UNUSED, 9, UNUSED, 3, UNUSED]),
    )
    result = output.result(Step(0, rows))
    assert result == StepResult(
        0,
        [[5, 6], [], [8], [9, 4], []],
        {0: RowDetails(2), 3: RowDetails(1), 4: RowDetails(1, FAILED)},
    )


def test_step_without_drafts() -> None:
    rows = [row(0, 0), row(1, 0)]
    result = StepOutput(torch.tensor([5, NO_TOKEN]), None, []).result(Step(0, rows))
    assert result == StepResult(0, [[5], []], {1: RowDetails(error=NO_DISTRIBUTION)})


def gathered(tokens: list[int]) -> GatheredLogprobs:
    """Return log-probabilities: minus the token, and token 1 as the most likely one."""
    ids = torch.tensor([[token, 1] for token in tokens])
    return GatheredLogprobs(ids, -ids.float(), torch.full((len(tokens),), 2))


def test_logprobs_are_those_of_all_samples_in_order() -> None:
    """The scheduler takes as many as there are tokens."""
    sampled = [5, 6, 7, 8]
    logprobs = SampledLogprobs([0, 0, 0], [1, 1, 1], gathered([5, 6, 7]))
    output = StepOutput(torch.tensor(sampled), logprobs, [], {}, torch.tensor([5, 9, 9, 9]))
    result = output.result(Step(0, [row(0, 2), row(1, 0)]))
    assert result.token_ids == [[5, 6], [8]]
    assert list(result.details) == [0]
    found = result.details[0].logprobs
    assert found is not None
    assert [value.token_ids for value in found] == [[5, 1], [6, 1], [7, 1]]
    assert [value.logprobs for value in found] == [[-5, -1], [-6, -1], [-7, -1]]


def test_prompt_logprobs_of_a_row_with_drafts() -> None:
    prompt = PromptLogprobs(0, 3, 0, gathered([2, 4]))
    output = StepOutput(torch.tensor([5, 6]), None, [prompt], {}, torch.tensor([5, UNUSED]))
    found = output.result(Step(0, [row(0, 1)])).details[0].prompt_logprobs
    assert found is not None
    assert [(place, value.token_ids) for place, value in found] == [(3, [2]), (4, [4])]


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
    step = Step(3, [Row(0, 0, 4, 1, True)], timer)
    result = PendingResult(step, StepOutput(torch.tensor([7]), None, [])).result()
    assert (result.step_id, result.token_ids) == (3, [[7]])
    assert (result.draft_seconds, result.seconds) == pytest.approx((2.5, 3.5))


@pytest.mark.parametrize("kept", [True, False])
def test_tokens_that_the_step_writes_to_the_host_are_read_when_it_is_done(
    monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """Symptom: they are copied at launch, before the device has written them."""
    tokens = torch.tensor([0])

    class Event:
        def record(self) -> None: ...

        def synchronize(self) -> None:
            if not tokens.item():
                tokens.fill_(7)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    output = StepOutput(tokens, None, [], on_host=True)
    pending = PendingResult(Step(0, [Row(0, 0, 4, 1, True)]), output)
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
        StepTimer, "__init__", lambda self, device: (made.append(self), init(self, device))[1]
    )
    llm: LLM = make_llm(demo_model.MODEL, max_model_len=64, speculative_config=speculative)
    llm.generate("A block", SamplingParams(max_tokens=3), use_tqdm=False)
    assert bool(made) == (speculative is not None)
