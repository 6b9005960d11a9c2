"""Orders of eviction: which cached blocks are left when the pool is full. Imports no torch."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st

from examples.lab.lfu_eviction import LeastFrequentlyUsed
from nanovllm.kv.eviction import EvictionOrder, LeastRecentlyUsed
from nanovllm.testing.fake_engine import VOCAB_SIZE, FakeEngine

ORDERS = (LeastRecentlyUsed, LeastFrequentlyUsed)
OPERATIONS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=60)


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


def test_pages_that_were_never_used_are_taken_in_ascending_order() -> None:
    """Symptom: a process touches all of its pool's memory for its first few requests."""
    for make in ORDERS:
        order = make(5)
        assert [order.take() for _ in range(5)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("make", ORDERS)
@settings(deadline=None, derandomize=True)
@given(operations=OPERATIONS)
def test_an_order_loses_no_page(
    make: type[EvictionOrder], operations: list[tuple[int, int]]
) -> None:
    """As the pool calls it: pages that hold nothing come first, and hits count until then."""
    order = make(10)
    in_use: set[int] = set()
    filled: set[int] = set()
    hits: Counter[int] = Counter()
    for kind, page in operations:
        if kind == 0 and len(order):
            expected = next(iter(order))
            taken = order.take()
            assert taken == expected
            assert filled.isdisjoint({*range(10)} - in_use - filled) or taken in filled
            if taken in filled:
                assert not ({*range(10)} - in_use - filled), "an empty page is left"
            in_use.add(taken)
            filled.discard(taken)
            del hits[taken]
        elif kind == 1 and page in in_use:
            in_use.remove(page)
            order.put_last(page)
            filled.add(page)
        elif kind == 2 and page in in_use:
            in_use.remove(page)
            order.put_first(page)
            filled.discard(page)
        elif kind == 3 and page in filled and page not in in_use:
            order.remove(page)
            in_use.add(page)
            order.touch(page)
        elif kind == 4 and page in filled and page not in in_use:
            order.put_first(page)
            filled.remove(page)
        free = list(order)
        assert {*free} == {*range(10)} - in_use
        assert len(free) == len(order)
        assert all(page in order for page in free)
        assert not any(page in order for page in in_use)
