"""Policies and eviction orders that fail: each ends the engine with an error that names it.

What they return is for `nanovllm lab check` to find. Imports no torch.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from examples.lab.lfu_eviction import LeastFrequentlyUsed
from nanovllm.errors import PluginError
from nanovllm.kv.eviction import EvictionOrder
from nanovllm.options.plugins import make_guarded
from nanovllm.scheduler.fair_policy import FairPolicy
from nanovllm.scheduler.policy import Policy
from nanovllm.testing.fake_engine import FakeEngine

pytestmark = pytest.mark.timeout(10)

Method = Callable[..., Any]


def fail(*_: object) -> None:
    raise ValueError("a mistake")


def run_out(*_: object) -> None:
    raise MemoryError


def mistaken(make: Callable[..., Any], method: str, wrong: Method) -> Callable[..., Any]:
    """Return what makes an object one of whose methods is wrong."""
    return type("Mistaken", (make,), {method: wrong})


def run(policy: Callable[..., Any] | None, order: Callable[..., Any] | None) -> None:
    """Run requests that share prompts, wait, are preempted, and evict."""
    more: dict[str, Any] = {}
    if policy is not None:
        more["make_policy"] = partial(make_guarded, "the policy m:C", Policy, policy)
    if order is not None:
        more["make_order"] = partial(make_guarded, "the order m:C", EvictionOrder, order)
    engine = FakeEngine(
        num_blocks=14, block_size=2, max_num_seqs=4, max_model_len=24, max_num_batched_tokens=8,
        **more,
    )  # fmt: skip
    for _ in range(3):
        for first in range(5):
            engine.add([first, 1, 2, 3, 4], max_tokens=12, ignore_eos=True)
        engine.run()


def keep_taken(self: LeastFrequentlyUsed) -> int:
    page = LeastFrequentlyUsed.take(self)
    self.put_first(page)
    return page


@pytest.mark.parametrize(
    ("method", "wrong", "message"),
    [
        *((name, fail, rf"{name}\(\) raised ValueError: a mistake")
          for name in ("push", "remove", "first", "order", "advance", "share", "victim")),
        *((name, run_out, rf"{name}\(\) raised MemoryError") for name in ("push", "advance")),
    ],
)  # fmt: skip
def test_a_wrong_policy_is_an_error(method: str, wrong: Method, message: str) -> None:
    with pytest.raises(PluginError, match=f"the policy m:C: {message}.*make a new LLM"):
        run(mistaken(FairPolicy, method, wrong), None)


@pytest.mark.parametrize(
    ("method", "wrong", "message"),
    [
        *((name, fail, rf"the order m:C: {name}\(\) raised ValueError: a mistake")
          for name in ("take", "put_last", "put_first", "remove", "touch")),
        ("take", run_out, r"the order m:C: take\(\) raised MemoryError"),
        ("take", keep_taken, r"eviction_policy: take\(\) returned page \d+, which is in use"),
    ],
)  # fmt: skip
def test_a_wrong_eviction_order_is_an_error(method: str, wrong: Method, message: str) -> None:
    with pytest.raises(PluginError, match=f"{message}.*make a new LLM"):
        run(None, mistaken(LeastFrequentlyUsed, method, wrong))


def test_an_order_that_moves_a_running_sequence_is_an_error() -> None:
    """Symptom: a sequence that runs is admitted again."""
    moved: set[int] = set()

    def order(_: object, seq: Any) -> tuple[bool, int]:
        return (seq.seq_id in moved, seq.seq_id)

    make = mistaken(FairPolicy, "order", order)
    engine = FakeEngine(
        max_num_batched_tokens=6,
        max_model_len=60,
        num_blocks=60,
        make_policy=make,
    )
    engine.add([1, 2], max_tokens=9, ignore_eos=True)
    engine.step()
    long = engine.add([1] * 40, max_tokens=2, ignore_eos=True)
    engine.scheduler.schedule()
    assert long.table_idx is not None
    moved.add(0)
    with pytest.raises(PluginError, match=r"order\(\) puts sequence 1 elsewhere"):
        engine.scheduler.schedule()
