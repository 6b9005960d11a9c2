"""Random runs with adapters: each request gets the tokens of its own adapter, and none starves.

Imports no torch.
"""

from functools import partial
from typing import Any

from hypothesis import settings, strategies as st
from hypothesis.stateful import initialize, invariant

from nanovllm.kv.windows import WindowSpec
from tests.lora.fake_adapters import AdapterEngine, TieredAdapterEngine, check_adapters
from tests.scheduler.test_random_runs import UsersMachine, clock
from tests.tiers.test_load_runs import (
    OPTIONS,
    TieredStatesMachine,
    TieredWindowsMachine,
    TiersMachine,
)

__all__ = ["clock"]

ADAPTERS: dict[str, Any] = {"max_loras": st.integers(1, 3), "num_adapters": st.integers(1, 6)}


class AdaptersMachine(UsersMachine):
    """Adapters, users, salts and drafts."""

    engine: AdapterEngine
    with_drafts = True

    @initialize(
        max_model_len=st.integers(2, 24),
        block_size=st.integers(1, 5),
        num_spare_blocks=st.integers(0, 6),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.integers(1, 30),
        eos_token_ids=st.sampled_from([(), (3,)]),
        prefix_caching=st.sampled_from([True, True, False]),
        queue_depth=st.sampled_from([0, 1, 1, 2]),
        seed=st.integers(0, 2**32),
        follows_drafts=st.booleans(),
        **ADAPTERS,
    )
    def start(self, max_loras: int, num_adapters: int, **options: Any) -> None:  # type: ignore[override]
        self.engine_class = partial(AdapterEngine, max_loras=max_loras, num_adapters=num_adapters)  # type: ignore[assignment]
        super().start(**options)

    @invariant()
    def check_slots(self) -> None:
        check_adapters(self.engine.adapters)


class TieredAdaptersMachine(TiersMachine):
    """The same with tiers: a store keeps each adapter's KV under keys of its own."""

    tiered_class = TieredAdapterEngine

    @initialize(**OPTIONS, **ADAPTERS)
    def start(self, **options: Any) -> None:  # type: ignore[override]
        super().start(**options)


class WindowAdaptersMachine(TieredWindowsMachine):
    """The same with window groups."""

    tiered_class = TieredAdapterEngine

    @initialize(
        windows=st.lists(
            st.builds(WindowSpec, st.integers(1, 12), st.integers(1, 3)), min_size=1, max_size=2
        ),
        **OPTIONS,
        **ADAPTERS,
    )
    def start(self, **options: Any) -> None:  # type: ignore[override]
        super().start(**options)


class StateAdaptersMachine(TieredStatesMachine):
    """The same with states."""

    tiered_class = TieredAdapterEngine

    @initialize(
        state_pages=st.integers(1, 4),
        snapshot_interval=st.sampled_from([1, 4, 8, 1000]),
        **OPTIONS,
        **ADAPTERS,
    )
    def start(self, **options: Any) -> None:  # type: ignore[override]
        super().start(**options)


AdaptersMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)

for machine in (TieredAdaptersMachine, WindowAdaptersMachine, StateAdaptersMachine):
    machine.TestCase.settings = settings(
        max_examples=15, stateful_step_count=40, deadline=None, derandomize=True
    )

TestAdapters = AdaptersMachine.TestCase

TestTieredAdapters = TieredAdaptersMachine.TestCase

TestWindowAdapters = WindowAdaptersMachine.TestCase

TestStateAdapters = StateAdaptersMachine.TestCase
