"""Random runs with tiers: no sequence reads another's KV, nothing leaks and nothing starves.

Loads are slow, fail, fail in part, and end for sequences that are gone. Imports no torch.
"""

import random
from typing import Any

from hypothesis import settings, strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from nanovllm.testing.fake_engine import VOCAB_SIZE, random_guesses
from nanovllm.testing.random_runs import INDEX, make_controller
from tests.every_case import examples
from tests.scheduler.test_random_runs import HitsMachine, clock
from tests.tiers.fake_tiers import FakeStore, TieredEngine
from tests.tiers.invariants import check_tiers

__all__ = ["clock"]

TEXTS = [random.Random(seed).choices(range(VOCAB_SIZE), k=40) for seed in range(3)]
OPTIONS = {
    "max_model_len": st.integers(8, 40),
    "block_size": st.integers(1, 4),
    "num_spare_blocks": st.sampled_from([0, 1, 3, 6, 12]),
    "num_host_slots": st.sampled_from([0, 1, 4, 12, 40, 200]),
    "has_store": st.booleans(),
    "max_num_seqs": st.integers(1, 6),
    "max_num_batched_tokens": st.integers(1, 40),
    "eos_token_ids": st.sampled_from([(), (3,), (3, 4)]),
    "queue_depth": st.sampled_from([0, 0, 1, 1, 2, 4]),
    "seed": st.integers(0, 2**32),
    "with_drafts": st.sampled_from([False, False, True]),
    "token_seconds": st.sampled_from([0.0, 0.0, 0.001]),
}


class TiersMachine(HitsMachine):
    """Random runs of a model that has KV blocks alone."""

    engine: TieredEngine
    tiered_class: type[TieredEngine] = TieredEngine

    @initialize(**OPTIONS)
    def start(self, **options: Any) -> None:  # type: ignore[override]
        self.make_engine(**options)

    def make_engine(
        self,
        max_model_len: int,
        block_size: int,
        num_spare_blocks: int,
        has_store: bool,
        eos_token_ids: tuple[int, ...],
        seed: int,
        with_drafts: bool,
        num_pages: int = 0,
        **options: Any,
    ) -> None:
        """Start an engine.

        Args:
            num_pages: that one sequence needs beside its KV blocks.
        """
        self.store = FakeStore()
        self.options = dict(
            num_blocks=-(-max_model_len // block_size) + num_pages + num_spare_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            eos_token_ids=frozenset(eos_token_ids),
            propose=random_guesses(seed) if with_drafts else None,
            controller=make_controller(seed) if with_drafts else None,
            store=self.store if has_store else None,
            seed=seed,
            **options,
        )
        self.engine = self.tiered_class(**self.options)

    @rule(
        text=st.sampled_from(TEXTS),
        length=st.integers(1, 40),
        more=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=2),
        max_tokens=st.integers(1, 12),
        index=INDEX,
        num_alike=st.sampled_from([1, 1, 1, 3]),
    )
    def add_a_text(
        self,
        text: list[int],
        length: int,
        more: list[int],
        max_tokens: int,
        index: int,
        num_alike: int,
    ) -> None:
        for _ in range(num_alike):
            self.add(
                text[:length] + more,
                max_tokens=max_tokens,
                ignore_eos=True,
                priority=index % 2,
                index=index,
            )

    @rule(seed=st.integers(0, 2**32))
    def restart(self, seed: int) -> None:
        """Another process has the same store."""
        self.engine.run()
        self.engine.worker.finish_writes()
        self.engine = self.tiered_class(**{**self.options, "seed": seed})

    @invariant()
    def check_loads(self) -> None:
        check_tiers(self.engine.loads)

    @rule()
    def reset(self) -> None:
        manager = self.engine.manager
        if manager.reset_prefix_cache():
            assert manager.trie.nodes == {}

    @precondition(lambda self: self.store.entries)
    @rule(index=INDEX, is_damaged=st.booleans())
    def lose_an_entry(self, index: int, is_damaged: bool) -> None:
        key = list(self.store.entries)[index % len(self.store.entries)]
        if is_damaged:
            self.store.entries[key] = None
        else:
            del self.store.entries[key]


TiersMachine.TestCase.settings = settings(
    max_examples=examples(40), stateful_step_count=40, deadline=None, derandomize=True
)

TestTiers = TiersMachine.TestCase


def do_something(machine: TiersMachine, rng: random.Random) -> None:
    """Call a rule. Most requests are alike, and most calls are steps."""
    engine, index = machine.engine, rng.randrange(16)
    tokens = rng.choices(range(VOCAB_SIZE), k=rng.randint(1, 20))
    rule_number = rng.random()
    if rule_number < 0.3:
        num_alike = rng.choice([1, 1, 1, 3])
        machine.add_a_text(
            rng.choice(TEXTS), rng.randint(1, 40), tokens[:2], rng.randint(1, 12), index, num_alike
        )
    elif rule_number < 0.33:
        priority = rng.choice([0, 0, -1, 1])
        machine.add(tokens, len(tokens), rng.random() < 0.5, priority, index, rng.random() < 0.3)
    elif rule_number < 0.36 and engine.sequences:
        machine.add_with_a_known_prefix(index, rng.randint(1, 24), tokens, rng.choice([1, 2]))
    elif rule_number < 0.4 and engine.sequences:
        machine.abort(index)
    elif rule_number < 0.41 and engine.sequences:
        machine.break_one(index, rng.randrange(9))
    elif rule_number < 0.42:
        machine.add_one_with_prompt_logprobs(tokens, index, rng.randrange(16))
    elif rule_number < 0.43:
        machine.reset()
    elif rule_number < 0.46 and machine.store.entries:
        machine.lose_an_entry(index, rng.random() < 0.5)
    elif rule_number < 0.47:
        machine.restart(rng.randrange(2**32))
    elif rule_number < 0.49:
        machine.fail_to_launch()
    elif rule_number < 0.51 and not engine.worker.is_broken:
        machine.fail()
    elif rule_number < 0.65 and len(engine.in_flight) <= engine.queue_depth:
        machine.launch()
    elif rule_number < 0.75 and engine.in_flight:
        machine.retire()
    else:
        machine.run_steps(rng.randint(1, 6))
    machine.check()
