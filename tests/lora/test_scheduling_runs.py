"""Random runs with adapters: each request gets the tokens of its own adapter, and none starves.

Imports no torch.
"""

from functools import partial
from typing import Any

from hypothesis import settings, strategies as st
from hypothesis.stateful import initialize, invariant

from tests.every_case import examples
from tests.lora.fake_adapters import AdapterEngine, check_adapters
from tests.scheduler.test_random_runs import HitsMachine, clock

__all__ = ["clock"]

ADAPTERS: dict[str, Any] = {"max_loras": st.integers(1, 3), "num_adapters": st.integers(1, 6)}


class AdaptersMachine(HitsMachine):
    """Adapters, users, salts and drafts."""

    engine: AdapterEngine

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
        super().start(with_drafts=True, **options)

    @invariant()
    def check_slots(self) -> None:
        check_adapters(self.engine.adapters)


AdaptersMachine.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None, derandomize=True
)

TestAdapters = AdaptersMachine.TestCase
