"""Orders of eviction: which cached blocks are left when the pool is full. Imports no torch."""

import random

import pytest

from examples.lab.lfu_eviction import LeastFrequentlyUsed
from nanovllm.kv.eviction import EvictionOrder, LeastRecentlyUsed
from nanovllm.testing.fake_engine import VOCAB_SIZE, FakeEngine
from nanovllm.testing.random_runs import OrderMachine, run_machine


def prompt(seed: int, length: int = 8) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=length)


@pytest.mark.parametrize(("make", "num_cached"), [(LeastRecentlyUsed, 0), (LeastFrequentlyUsed, 6)])
def test_what_is_hit_often_is_kept_if_it_counts(make: type[EvictionOrder], num_cached: int) -> None:
    """A prompt that three requests share, then many that are asked once."""
    engine = FakeEngine(num_blocks=16, block_size=2, make_order=make)
    for _ in range(3):
        engine.add(prompt(0), max_tokens=1)
        engine.run()
    for seed in range(1, 8):
        engine.add(prompt(seed), max_tokens=1)
        engine.run()
    again = engine.add(prompt(0), max_tokens=1)
    engine.run()
    assert again.num_cached_tokens == num_cached


@pytest.mark.parametrize("make", [LeastRecentlyUsed, LeastFrequentlyUsed])
def test_an_order_loses_no_page(make: type[EvictionOrder]) -> None:
    """Symptom of another order: a process touches all of its pool for its first few requests."""
    run_machine(lambda: OrderMachine(make), 15)
