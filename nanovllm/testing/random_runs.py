"""Random arrivals, aborts, failures and steps: each request gets the tokens it gets alone.

Needs hypothesis, of the extra `lab`. Imports no torch.
"""

import contextlib
from collections.abc import Callable, Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest import mock

from hypothesis import HealthCheck, Phase, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from nanovllm.core.worker_info import WindowSpec, pages_for
from nanovllm.features.speculation import drafting
from nanovllm.features.speculation.draft_controller import DraftController
from nanovllm.kv.eviction import EvictionOrder
from nanovllm.testing.fake_engine import VOCAB_SIZE, FakeEngine, random_guesses, random_limits
from nanovllm.testing.invariants import check_scheduler

PROMPT = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=20)

INDEX = st.integers(0, 15)
USERS = ["", "ann", "bob"]
NUM_PAGES = 10
_WINDOWS = (WindowSpec(3, 1), WindowSpec(8, 2))
LAYERS: tuple[dict[str, Any], ...] = (
    {},
    {"windows": _WINDOWS},
    {"state_pages": 2},
    {"windows": _WINDOWS, "state_pages": 2},
)
TICK = 2.0**-14  # its multiples have exact differences


@contextlib.contextmanager
def steady_clock() -> Iterator[None]:
    """Let each look at the clock take as long: the same run then always has the same drafts."""
    ticks = count()
    fake = SimpleNamespace(perf_counter=lambda: next(ticks) * TICK)
    with mock.patch.object(drafting, "time", fake):
        yield


def make_controller(seed: int) -> DraftController:
    """Return a controller of random limits, or now and then the real one."""
    if seed % 4:
        return random_limits(seed)
    return DraftController(
        8, ((1, 0.010), (4, 0.011), (8, 0.012), (32, 0.016)), ((1, 0.0002, 0.0001),)
    )


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, aborts, failures and steps; the KV pool is often too small.

    A subclass says by `initialize` with which options `start` is called.
    """

    users = USERS[:1]  # these take turns
    salts: tuple[str | None, ...] = (None,)
    engine_class: type[FakeEngine] = FakeEngine

    def start(
        self,
        max_model_len: int,
        block_size: int,
        num_spare_blocks: int,
        max_num_batched_tokens: int,
        eos_token_ids: tuple[int, ...],
        seed: int,
        layers: dict[str, Any] = LAYERS[0],
        with_drafts: bool = False,
        follows_drafts: bool = False,
        **options: Any,
    ) -> None:
        windows, state_pages = tuple(layers.get("windows", ())), layers.get("state_pages", 0)
        num_pages = pages_for(max_model_len, block_size, windows, max_num_batched_tokens)
        self.engine = self.engine_class(
            num_blocks=num_pages + state_pages + num_spare_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            eos_token_ids=frozenset(eos_token_ids),
            propose=random_guesses(seed) if with_drafts else None,
            controller=make_controller(seed) if with_drafts else None,
            follows_drafts=follows_drafts and not state_pages,
            **{**layers, "windows": windows},
            **options,
        )

    def teardown(self) -> None:
        self.engine.run()

    @rule(
        prompt=PROMPT,
        max_tokens=st.integers(1, 24),
        ignore_eos=st.booleans(),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        forces=st.sampled_from([False, False, True]),
        index=INDEX,
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        ignore_eos: bool,
        priority: int,
        index: int,
        forces: bool = False,
    ) -> None:
        self.engine.add(
            prompt[: self.engine.scheduler.max_model_len - 1],
            max_tokens,
            ignore_eos=ignore_eos,
            priority=priority,
            user=self.users[index % len(self.users)],
            cache_salt=self.salts[index % len(self.salts)],
            forces=forces,
        )

    @precondition(lambda self: self.engine.sequences)
    @rule(
        index=INDEX, num_kept=st.integers(1, 24), more=PROMPT, num_alike=st.sampled_from([1, 1, 2])
    )
    def add_with_a_known_prefix(
        self, index: int, num_kept: int, more: list[int], num_alike: int
    ) -> None:
        known = self.engine.sequences[index % len(self.engine.sequences)].token_ids
        for _ in range(num_alike):
            self.add(
                known[:num_kept] + more[:3], max_tokens=8, ignore_eos=False, priority=0, index=index
            )

    @precondition(lambda self: self.engine.scheduler.num_unfinished < 4)
    @rule(firsts=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=2, max_size=3))
    def add_some_that_grow(self, firsts: list[int]) -> None:
        for index, first in enumerate(firsts):
            self.engine.add(
                [first], max_tokens=24, ignore_eos=True, user=self.users[index % len(self.users)]
            )

    @precondition(lambda self: self.engine.sequences)
    @rule(index=INDEX)
    def abort(self, index: int) -> None:
        self.engine.abort(self.engine.sequences[-1 - index % len(self.engine.sequences)])

    @precondition(lambda self: self.engine.sequences)
    @rule(index=INDEX, num_more=st.integers(0, 8))
    def break_one(self, index: int, num_more: int) -> None:
        seq = self.engine.sequences[-1 - index % len(self.engine.sequences)]
        if not seq.is_finished:
            self.engine.worker.fails_from.setdefault(seq.seq_id, len(seq.token_ids) + num_more)

    @precondition(lambda self: len(self.engine.in_flight) <= self.engine.queue_depth)
    @rule()
    def launch(self) -> None:
        self.engine.launch()

    @precondition(lambda self: self.engine.in_flight)
    @rule()
    def retire(self) -> None:
        self.engine.retire()

    @rule(num_steps=st.integers(1, 6))
    def run_steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.engine.step()
            check_scheduler(self.engine.scheduler)

    @rule()
    def fail_to_launch(self) -> None:
        self.engine.step(fails_to_launch=True)

    @precondition(lambda self: not self.engine.worker.is_broken)
    @rule()
    def fail(self) -> None:
        self.engine.worker.is_broken = True
        if not self.engine.step():  # no step was launched, so none failed
            self.engine.worker.is_broken = False

    @invariant()
    def check(self) -> None:
        check_scheduler(self.engine.scheduler)


class PluginMachine(SchedulerMachine):
    """Random runs with a policy or an order of eviction, of a model whose layers have windows,
    states, both or neither.

    Args:
        plugin: `make_policy` or `make_order` of `FakeEngine`.
    """

    users = USERS
    salts = (None, None, None, "salt")

    def __init__(self, **plugin: Any) -> None:
        super().__init__()
        self.plugin = plugin

    @initialize(
        max_model_len=st.integers(2, 24),
        block_size=st.integers(1, 5),
        layers=st.sampled_from(LAYERS),
        num_spare_blocks=st.integers(0, 8),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.integers(1, 30),
        eos_token_ids=st.sampled_from([(), (3,), (3, 4)]),
        queue_depth=st.sampled_from([0, 0, 1, 2]),
        seed=st.integers(0, 2**32),
        with_drafts=st.booleans(),
    )
    def start(self, **options: Any) -> None:
        super().start(**options, **self.plugin)
        self.engine.is_strict = False  # that is of the default policy


class OrderMachine(RuleBasedStateMachine):
    """Random calls of an order of eviction, as the pool makes them.

    Args:
        make: makes the order, for `NUM_PAGES` pages.
    """

    def __init__(self, make: Callable[[int], EvictionOrder]) -> None:
        super().__init__()
        self.order = make(NUM_PAGES)
        self.in_use: set[int] = set()
        self.filled: set[int] = set()
        """Pages that hold something."""
        self.untouched = list(range(NUM_PAGES))

    @precondition(lambda self: len(self.in_use) < NUM_PAGES)
    @rule()
    def take(self) -> None:
        free = {*range(NUM_PAGES)} - self.in_use
        expected = next(iter(self.order))
        page = self.order.take()
        assert page == expected, f"take() returned {page}, and {expected} was first of iter()"
        assert page in free, f"take() returned page {page}, which is in use"
        if page in self.filled:
            assert free <= self.filled, f"take() returned page {page}, which holds something"
        if self.untouched and page in self.untouched:
            assert page == self.untouched.pop(0), "pages never used are not taken in order"
        self.in_use.add(page)
        self.filled.discard(page)

    @precondition(lambda self: self.in_use)
    @rule(index=INDEX, is_filled=st.booleans())
    def let_go(self, index: int, is_filled: bool) -> None:
        page = sorted(self.in_use)[index % len(self.in_use)]
        self.in_use.remove(page)
        if is_filled:
            self.filled.add(page)
            self.order.put_last(page)
        else:
            self.filled.discard(page)
            self.order.put_first(page)

    @precondition(lambda self: self.filled - self.in_use)
    @rule(index=INDEX, is_hit=st.booleans())
    def hit_or_clear(self, index: int, is_hit: bool) -> None:
        free = sorted(self.filled - self.in_use)
        page = free[index % len(free)]
        if is_hit:
            self.order.remove(page)
            self.in_use.add(page)
            self.order.touch(page)
        else:
            self.filled.remove(page)
            self.order.put_first(page)

    @precondition(lambda self: self.filled & self.in_use)
    @rule(index=INDEX)
    def hit_one_in_use(self, index: int) -> None:
        pages = sorted(self.filled & self.in_use)
        self.order.touch(pages[index % len(pages)])

    @invariant()
    def check(self) -> None:
        free = list(self.order)
        expected = sorted({*range(NUM_PAGES)} - self.in_use)
        assert sorted(free) == expected, f"it holds {sorted(free)}, and {expected} are free"
        assert len(self.order) == len(free), "len() is wrong"
        assert all(page in self.order for page in free), "a free page is not in the order"
        assert not any(page in self.order for page in self.in_use), "a page in use is free"


def run_machine(make: Callable[[], RuleBasedStateMachine], num_runs: int) -> None:
    """Make random runs, the same each time: a half of 10 calls at most, then a half of 40.

    So a fault that a few calls show is shown by a few. Making a run shorter that failed would take
    minutes where it is long because nothing ends.

    Raises:
        Exception: what the first run raises that fails. Its notes are the calls of that run.
    """
    for num_calls in (10, 40):
        how = settings(
            max_examples=max(1, num_runs // 2),
            stateful_step_count=num_calls,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            report_multiple_bugs=False,
            suppress_health_check=[*HealthCheck],
        )
        with steady_clock():
            run_state_machine_as_test(make, settings=how)  # type: ignore[arg-type]
