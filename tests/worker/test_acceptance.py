"""Acceptance: which of a step's samples become a row's tokens, and which finish_infos count."""

import pytest
import torch

from nanovllm.core.messages import FinishInfo, Row, RowDetails, StepResult
from nanovllm.layers.sampler import NO_TOKEN, RULED_OUT
from nanovllm.platform.cpu import CPU
from nanovllm.worker.step_output import PendingResult, StepOutput

FAILED = FinishInfo("error", "a logits processor failed: ValueError: no")
UNUSED = 99
"""What the table holds behind a row's last draft."""


def row(seq_id: int, num_drafts: int) -> Row:
    return Row(seq_id, seq_id, 4, 1 + num_drafts, samples=True, num_draft_tokens=num_drafts)


def accept(
    drafts: list[int], sampled: list[int], finish_infos: dict[int, FinishInfo] | None = None
) -> tuple[list[int], FinishInfo | None]:
    """Return the tokens and the ending of a step of one row."""
    output = StepOutput(
        torch.tensor(sampled), [], finish_infos or {}, torch.tensor([*drafts, UNUSED])
    )
    result = PendingResult(7, [row(0, len(drafts))], output, CPU()).result()
    assert result.step_id == 7
    (tokens,) = result.token_ids
    found = result.details.get(0, RowDetails())
    assert found.num_draft_tokens == len(drafts)
    return tokens, found.finish_info


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


def test_failure_behind_accepted_drafts_comes_with_the_next_step() -> None:
    assert accept([5, 6], [5, NO_TOKEN, 7]) == ([5], None)
    assert accept([5, 6], [5, 6, NO_TOKEN]) == ([5, 6], None)
    assert accept([5, 6], [5, 6, 7], finish_infos={1: FAILED}) == ([5], None)


def test_failure_behind_a_wrong_draft_does_not_count() -> None:
    assert accept([5, 6], [9, NO_TOKEN, 7]) == ([9], None)
    assert accept([5, 6], [9, 6, 7], finish_infos={1: FAILED, 2: FAILED}) == ([9], None)


def test_reason_of_a_processor_comes_before_that_of_the_logits() -> None:
    assert accept([5], [NO_TOKEN, 6], finish_infos={0: FAILED}) == (
        [],
        FAILED._replace(kv_invalid=True),
    )
    assert accept([5], [RULED_OUT, 6], finish_infos={0: FAILED}) == ([], FAILED)


def test_each_row_has_its_own_samples_and_ending() -> None:
    rows = [
        row(0, 2),
        Row(1, 1, 0, 3, samples=False),
        row(2, 0),
        row(3, 1),
        row(4, 1),
    ]
    output = StepOutput(
        torch.tensor([5, 6, 7, 8, 9, 4, 3, 3]),
        [],
        {6: FAILED},
        torch.tensor([5, 9, UNUSED, UNUSED, 9, UNUSED, 3, UNUSED]),
    )
    result = PendingResult(0, rows, output, CPU()).result()
    assert result == StepResult(
        0,
        [[5, 6], [], [8], [9, 4], []],
        {0: RowDetails(2), 3: RowDetails(1), 4: RowDetails(1, FAILED)},
    )
