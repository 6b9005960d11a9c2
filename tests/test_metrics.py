"""The times in a request's metrics."""

import time
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.outputs import DraftCounts
from nanovllm.testing.fake_engine import fake_controller
from tests.helpers import generate_all


@pytest.fixture
def llm(random_llm: LLM) -> LLM:
    return random_llm


def test_times_are_in_order(make_llm: Any, random_model: str) -> None:
    """max_num_seqs is 1, so the second request waits for the first."""
    llm = make_llm(random_model, max_num_seqs=1)
    before = time.monotonic()
    outputs = generate_all(llm, [([1, 2, 3], SamplingParams(0, 5, ignore_eos=True, n=2))] * 2)
    after = time.monotonic()
    for output in outputs:
        metrics = output.metrics
        times = [
            before,
            metrics.arrival_time,
            metrics.first_scheduled_time,
            metrics.first_token_time,
            metrics.last_token_time,
            after,
        ]
        assert times == sorted(times, key=float)
        assert metrics.num_output_tokens == 10
        assert metrics.queue_time == metrics.first_scheduled_time - metrics.arrival_time >= 0
        assert metrics.time_to_first_token == metrics.first_token_time - metrics.arrival_time > 0
        spent = metrics.last_token_time - metrics.first_token_time
        assert metrics.time_per_output_token == spent / 9 > 0
    first, second = (output.metrics for output in outputs)
    assert second.first_scheduled_time >= first.first_token_time
    assert second.queue_time > first.queue_time


def test_one_token_has_no_time_per_output_token(llm: LLM) -> None:
    (output,) = generate_all(llm, [([1], SamplingParams(max_tokens=1))])
    assert output.metrics.time_per_output_token is None
    assert output.metrics.drafts == DraftCounts()
    assert output.metrics.first_token_time == output.metrics.last_token_time


def test_queue_time_excludes_the_first_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is scheduled when its first step is launched, not when that step is done."""
    executor = llm.engine.executor
    execute = executor.execute

    def slow(schedule: Any) -> Any:
        time.sleep(0.2)
        return execute(schedule)

    monkeypatch.setattr(executor, "execute", slow)
    (output,) = generate_all(llm, [([1], SamplingParams(max_tokens=1))])
    assert output.metrics.time_to_first_token >= 0.2
    assert output.metrics.queue_time < 0.2


def test_drafts_of_all_continuations_are_counted(make_llm: Any, random_model: str) -> None:
    """An output's counts are its own: later steps do not change them."""
    llm = make_llm(random_model, dtype="float32", speculative_config={"method": "ngram"})
    llm.engine.scheduler.drafting.controller = fake_controller(lambda most: min(most, 3))
    params = SamplingParams(0, 20, ignore_eos=True, n=2, allowed_token_ids=[3])
    outputs = list(llm.stream([3, 4] * 3, params))
    drafts = [output.metrics.drafts for output in outputs]
    assert drafts[0].num_drafts == 0
    sizes = [counts.num_draft_tokens for counts in drafts]
    assert sizes == sorted(sizes)
    last = drafts[-1]
    assert last.num_draft_tokens >= last.num_accepted_tokens > 20
    assert sum(last.num_accepted_tokens_per_pos) == last.num_accepted_tokens
    assert len(last.num_accepted_tokens_per_pos) == 3
