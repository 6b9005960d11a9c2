"""Random runs with users, salts and drafts, of layers of all kinds. Imports no torch."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import initialize, rule

from nanovllm.core.worker_info import WindowSpec
from nanovllm.testing.random_runs import (
    INDEX,
    PROMPT,
    USERS,
    SchedulerMachine,
    steady_clock,
)
from tests.every_case import examples

WINDOWS = st.lists(
    st.builds(WindowSpec, st.sampled_from([1, 2, 3, 5, 8, 12, 40]), st.integers(1, 3)),
    min_size=1,
    max_size=2,
)
LAYERS = st.fixed_dictionaries({"windows": st.just([]) | WINDOWS}) | st.fixed_dictionaries(
    {"state_pages": st.integers(1, 6), "snapshot_interval": st.sampled_from([1, 4, 8, 1000])}
)


@pytest.fixture(autouse=True, scope="module")
def clock() -> Iterator[None]:
    with steady_clock():
        yield


class HitsMachine(SchedulerMachine):
    """Users take turns, and salts separate their cached blocks. Some prompts want log-probabilities
    from a token on.
    """

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

    @rule()
    def reset(self) -> None:
        manager = self.engine.manager
        if manager.reset_prefix_cache():
            assert manager.trie.nodes == {}
            assert self.engine.states is None or self.engine.states._snapshots == {}


class LayersMachine(HitsMachine):
    """The same with windows or states, and with right and wrong drafts or none."""

    @initialize(
        max_model_len=st.integers(2, 24),
        block_size=st.integers(1, 5),
        layers=LAYERS,
        num_spare_blocks=st.sampled_from([0, 1, 3, 6, 12, 30]),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.integers(1, 40),
        eos_token_ids=st.sampled_from([(), (3,), (3, 4)]),
        prefix_caching=st.sampled_from([True, True, True, False]),
        queue_depth=st.sampled_from([0, 0, 1, 1, 2, 4]),
        seed=st.integers(0, 2**32),
        with_drafts=st.booleans(),
        follows_drafts=st.booleans(),
    )
    def start(self, **options: Any) -> None:  # type: ignore[override]
        super().start(**options)


LayersMachine.TestCase.settings = settings(
    max_examples=examples(160), stateful_step_count=40, deadline=None, derandomize=True
)

TestLayers = LayersMachine.TestCase
