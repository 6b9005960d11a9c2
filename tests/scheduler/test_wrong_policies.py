"""Policies and eviction orders that are wrong: each ends the engine with an error that names it.

Symptoms without the checks: steps without end, wrong tokens, an AssertionError. Imports no torch.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from examples.lab.lfu_eviction import LeastFrequentlyUsed
from nanovllm.errors import PluginError
from nanovllm.kv.eviction import EvictionOrder, OrderRules
from nanovllm.options.plugins import guarded, in_step
from nanovllm.scheduler.policy import Policy, PolicyRules
from nanovllm.scheduler.prompt_queue import PromptQueue
from nanovllm.testing.fake_engine import Engine

pytestmark = pytest.mark.timeout(10)

Method = Callable[..., Any]


def fail(*_: object) -> None:
    raise ValueError("a mistake")


def run_out(*_: object) -> None:
    raise MemoryError


def constant(value: object) -> Method:
    return lambda *_: value


def mistaken(make: Callable[..., Any], method: str, wrong: Method) -> Callable[..., Any]:
    """Return what makes an object one of whose methods is wrong."""
    return type("Mistaken", (make,), {method: wrong})


def make_order(order: Callable[..., Any], num_pages: int) -> EvictionOrder:
    made, name = order(num_pages), "the order m:C"
    rules = in_step(name, "__len__()", OrderRules, made, num_pages)
    return guarded(made, EvictionOrder, name, rules)


def run(policy: Callable[..., Any] | None, order: Callable[..., Any] | None) -> None:
    """Run requests that share prompts, wait, are preempted, and evict."""
    more: dict[str, Any] = {}
    if policy is not None:
        more["make_policy"] = lambda: guarded(policy(), Policy, "the policy m:C", PolicyRules())
    if order is not None:
        more["make_order"] = partial(make_order, order)
    engine = Engine(
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


def take_and_say_another(self: LeastFrequentlyUsed) -> int:
    LeastFrequentlyUsed.take(self)
    return 0


def late_keys() -> Method:
    keys = iter([(1, 2), (2, 3), "text"] * 1000)
    return lambda *_: next(keys)


@pytest.mark.parametrize(
    ("method", "wrong", "message"),
    [
        ("share", constant(0), r"share\(\) returned 0 for a sequence with 5 tokens to compute in "
         r"a step that has 8 left: return an integer from 1 to 5"),
        ("share", lambda _, seq, missing, budget: missing + 1, r"share\(\) returned 6 "),
        ("share", lambda _, seq, missing, budget: missing, "has 3 left: .* from 1 to 3"),
        ("share", constant(None), r"share\(\) returned None"),
        ("share", constant(1.5), r"share\(\) returned 1\.5"),
        ("victim", constant(None), r"victim\(\) returned None, which is none of its \d candidates"),
        ("victim", lambda self, _: self.first(), r"victim\(\) returned sequence \d+"),
        ("first", constant(None), r"first\(\) returned None, but 5 sequences were pushed"),
        ("first", constant([7]), r"first\(\) returned \[7\], which was not pushed"),
        ("remove", constant(None), r"first\(\) returned sequence 0, which .* was removed"),
        ("order", constant(None), r"order\(\) returned None"),
        ("order", late_keys(), "keys must be comparable"),
        *((name, fail, rf"{name}\(\) raised ValueError: a mistake")
          for name in ("push", "remove", "first", "order", "advance", "share", "victim")),
        *((name, run_out, rf"{name}\(\) raised MemoryError") for name in ("push", "advance")),
    ],
)  # fmt: skip
def test_a_wrong_policy_is_an_error(method: str, wrong: Method, message: str) -> None:
    with pytest.raises(PluginError, match=f"the policy m:C: .*{message}.*make a new LLM"):
        run(mistaken(PromptQueue, method, wrong), None)


@pytest.mark.parametrize(
    ("method", "wrong", "message"),
    [
        ("take", constant(0), r"after take\(\) it has 14 pages, but 13 of 14 are free"),
        ("take", keep_taken, r"after take\(\) it has 14 pages, but 13 of 14 are free"),
        ("take", take_and_say_another, r"take\(\) returned page 0, which is in use"),
        ("take", constant(14), r"take\(\) returned 14: return a page from 0 to 13"),
        ("take", constant(None), r"take\(\) returned None"),
        ("put_last", constant(None), r"after put_last\(\d+\) it has (\d+) pages, but \d+ of 14"),
        ("put_first", constant(None), r"after put_first\(\d+\) it has (\d+) pages"),
        ("remove", constant(None), r"after remove\(\d+\) it has (\d+) pages"),
        ("__len__", constant(100), r"after __init__\(\) it has 100 pages, but 14 of 14 are free"),
        *((name, fail, rf"{name}\(\d*\) raised ValueError: a mistake")
          for name in ("take", "put_last", "put_first", "remove", "touch")),
        ("take", run_out, r"take\(\) raised MemoryError"),
    ],
)  # fmt: skip
def test_a_wrong_eviction_order_is_an_error(method: str, wrong: Method, message: str) -> None:
    with pytest.raises(PluginError, match=f"the order m:C: .*{message}.*make a new LLM"):
        run(None, mistaken(LeastFrequentlyUsed, method, wrong))


def test_right_ones_run_to_the_end() -> None:
    run(PromptQueue, LeastFrequentlyUsed)


def test_an_order_that_moves_a_running_sequence_is_an_error() -> None:
    """Symptom: a sequence that runs is admitted again."""
    moved: set[int] = set()

    def order(_: object, seq: Any) -> tuple[bool, int]:
        return (seq.seq_id in moved, seq.seq_id)

    make = mistaken(PromptQueue, "order", order)
    engine = Engine(
        max_num_batched_tokens=6,
        max_model_len=60,
        num_blocks=60,
        make_policy=partial(guarded, make(), Policy, "m:C", PolicyRules()),
    )
    engine.add([1, 2], max_tokens=9, ignore_eos=True)
    engine.step()
    long = engine.add([1] * 40, max_tokens=2, ignore_eos=True)
    engine.scheduler.schedule()
    assert long.table_idx is not None
    moved.add(0)
    with pytest.raises(PluginError, match=r"order\(\) puts sequence 1 elsewhere"):
        engine.scheduler.schedule()
