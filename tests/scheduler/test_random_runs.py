"""Random runs with the scheduler's own options, users and drafts. Imports no torch."""

from collections.abc import Iterator

import pytest
from hypothesis import (
    settings,
)
from hypothesis.stateful import rule

from nanovllm.testing.random_runs import INDEX, PROMPT, USERS, SchedulerMachine, steady_clock
from tests.every_case import examples


@pytest.fixture(autouse=True, scope="module")
def clock() -> Iterator[None]:
    with steady_clock():
        yield


class UsersMachine(SchedulerMachine):
    """The same with users who take turns, and with salts that separate their cached blocks."""

    users = USERS
    salts = (None, "salt", None, "other salt")


class HitsMachine(SchedulerMachine):
    """The same with users and few salts; some prompts want log-probabilities from a token on."""

    users = USERS
    salts = (None, None, None, "salt")

    @rule(prompt=PROMPT, index=INDEX, start=INDEX)
    def add_one_with_prompt_logprobs(self, prompt: list[int], index: int, start: int) -> None:
        prompt = prompt[: self.engine.scheduler.max_model_len - 1]
        self.engine.add(
            prompt,
            user=self.users[index % len(self.users)],
            prompt_logprobs=1,
            prompt_logprob_start=start % len(prompt),
        )


class SpeculationMachine(SchedulerMachine):
    """The same with a worker that proposes draft tokens, right and wrong ones.

    A controller sets how many, and the worker may propose fewer.
    """

    with_drafts = True


SchedulerMachine.TestCase.settings = settings(
    max_examples=examples(250), stateful_step_count=40, deadline=None, derandomize=True
)

UsersMachine.TestCase.settings = settings(
    max_examples=examples(120), stateful_step_count=40, deadline=None, derandomize=True
)

SpeculationMachine.TestCase.settings = settings(
    max_examples=examples(200), stateful_step_count=40, deadline=None, derandomize=True
)

TestScheduler = SchedulerMachine.TestCase

TestUsers = UsersMachine.TestCase

TestSpeculation = SpeculationMachine.TestCase
