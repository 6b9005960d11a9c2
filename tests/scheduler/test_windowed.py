"""Window groups: each request gets the tokens it gets alone, and holds only its window.

Imports no torch.
"""

from typing import Any

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import initialize

from nanovllm.scheduler.windows import WindowGroup, pages_for
from tests.scheduler.fake_engine import Engine, random_guesses
from tests.scheduler.test_random_runs import SchedulerMachine, clock, make_controller

__all__ = ["clock"]

GROUPS = st.lists(
    st.builds(WindowGroup, st.sampled_from([1, 2, 3, 5, 8, 40]), st.sampled_from([1, 3])),
    min_size=1,
    max_size=2,
)


class WindowsMachine(SchedulerMachine):
    """Random runs of a model with window groups, with drafts or without."""

    @initialize(
        max_model_len=st.integers(2, 24),
        block_size=st.integers(1, 5),
        windows=GROUPS,
        num_spare_blocks=st.integers(0, 12),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.integers(1, 12),
        eos_token_ids=st.sampled_from([(), (3,), (3, 4)]),
        prefix_caching=st.sampled_from([True, True, False]),
        queue_depth=st.sampled_from([0, 1, 1, 2, 4]),
        seed=st.integers(0, 2**32),
        with_drafts=st.booleans(),
        follows_drafts=st.booleans(),
    )
    def start(  # type: ignore[override]
        self,
        max_model_len: int,
        block_size: int,
        windows: list[WindowGroup],
        num_spare_blocks: int,
        max_num_batched_tokens: int,
        eos_token_ids: tuple[int, ...],
        seed: int,
        with_drafts: bool,
        **options: Any,
    ) -> None:
        num_pages = pages_for(max_model_len, block_size, windows, max_num_batched_tokens)
        self.engine = Engine(
            num_blocks=num_pages + num_spare_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            windows=tuple(windows),
            eos_token_ids=frozenset(eos_token_ids),
            propose=random_guesses(seed) if with_drafts else None,
            controller=make_controller(seed) if with_drafts else None,
            **options,
        )


WindowsMachine.TestCase.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, derandomize=True
)

TestWindows = WindowsMachine.TestCase
