"""Any mixture of groups, with tiers, adapters and drafts or without: each request gets its tokens.

So it is under another policy, and another order of eviction. Imports no torch.
"""

import itertools
import random
from typing import Any

import pytest

from examples.lab.lfu_eviction import LeastFrequentlyUsed
from examples.lab.shortest_job_first import ShortestFirst
from nanovllm.core.worker_info import WindowSpec, pages_for
from nanovllm.testing.fake_engine import VOCAB_SIZE, FakeEngine, random_guesses
from nanovllm.testing.invariants import check_scheduler
from nanovllm.testing.random_runs import make_controller
from tests.every_case import examples
from tests.lora.fake_adapters import AdapterEngine, TieredAdapterEngine, check_adapters
from tests.scheduler.test_random_runs import HitsMachine, clock
from tests.tiers.fake_tiers import FakeStore, TieredEngine
from tests.tiers.invariants import check_tiers

__all__ = ["clock"]

FEATURES = ("windows", "states", "tiers", "adapters", "drafts")
TEXTS = [random.Random(seed).choices(range(VOCAB_SIZE), k=40) for seed in range(3)]


class MixtureMachine(HitsMachine):
    """Random runs of a model with some of `FEATURES`."""

    def start(  # type: ignore[override]
        self,
        features: set[str],
        max_model_len: int,
        block_size: int,
        windows: list[WindowSpec],
        state_pages: int,
        snapshot_interval: int,
        num_spare_blocks: int,
        num_host_slots: int,
        has_store: bool,
        max_num_batched_tokens: int,
        eos_token_ids: tuple[int, ...],
        prefix_caching: bool,
        max_loras: int,
        num_adapters: int,
        seed: int,
        follows_drafts: bool,
        token_seconds: float,
        **options: Any,
    ) -> None:
        """Start an engine with `features`; options of others are ignored."""
        self.features = features
        self.store = FakeStore()
        windows = windows if "windows" in features else []
        state_pages = state_pages if "states" in features else 0
        num_pages = (
            pages_for(max_model_len, block_size, windows, max_num_batched_tokens) + state_pages
        )
        self.options = dict(
            num_blocks=num_pages + num_spare_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            windows=tuple(windows),
            state_pages=state_pages,
            snapshot_interval=snapshot_interval,
            eos_token_ids=frozenset(eos_token_ids),
            max_loras=max_loras,
            num_adapters=num_adapters if "adapters" in features else 0,
            **options,
        )
        if "drafts" in features:
            self.options |= {"propose": random_guesses(seed), "controller": make_controller(seed)}
            self.options["follows_drafts"] = follows_drafts and not state_pages
        if "tiers" in features:
            self.tiered_class = TieredAdapterEngine
            store = self.store if has_store or not num_host_slots else None
            self.options |= {"store": store, "num_host_slots": num_host_slots, "seed": seed}
            self.options["token_seconds"] = token_seconds
        else:
            self.tiered_class = OtherEngine  # type: ignore[assignment]
            self.options["prefix_caching"] = prefix_caching
        self.engine = self.tiered_class(**self.options)

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

    def restart(self, seed: int) -> None:
        """Another process has the same store."""
        self.engine.run()
        self.engine.worker.finish_writes()
        self.engine = self.tiered_class(**{**self.options, "seed": seed})

    def lose_an_entry(self, index: int, is_damaged: bool) -> None:
        key = list(self.store.entries)[index % len(self.store.entries)]
        if is_damaged:
            self.store.entries[key] = None
        else:
            del self.store.entries[key]

    def check(self) -> None:
        super().check()
        assert isinstance(self.engine, AdapterEngine)
        check_adapters(self.engine.adapters)
        if isinstance(self.engine, TieredEngine):
            check_tiers(self.engine.loads)


class OtherEngine(AdapterEngine):
    """An engine without tiers, which has nothing to write at its end."""

    def __init__(self, *, seed: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self.worker.finish_writes = lambda: None  # type: ignore[attr-defined]


def random_options(features: set[str], rng: random.Random) -> dict[str, Any]:
    return {
        "features": features,
        "max_model_len": rng.randint(8, 40),
        "block_size": rng.randint(1, 5),
        "windows": [WindowSpec(rng.randint(1, 12), rng.randint(1, 3)) for _ in "ab"][
            : rng.randint(1, 2)
        ],
        "state_pages": rng.randint(1, 4),
        "snapshot_interval": rng.choice([1, 4, 8, 1000]),
        "num_spare_blocks": rng.choice([0, 1, 3, 6, 12, 40]),
        "num_host_slots": rng.choice([0, 4, 12, 40, 200]),
        "has_store": rng.random() < 0.5,
        "max_num_seqs": rng.randint(1, 6),
        "max_num_batched_tokens": rng.randint(1, 40),
        "eos_token_ids": rng.choice([(), (3,), (3, 4)]),
        "prefix_caching": rng.random() < 0.8,
        "queue_depth": rng.choice([0, 0, 1, 1, 2, 4]),
        "max_loras": rng.randint(1, 3),
        "num_adapters": rng.randint(1, 6),
        "seed": rng.randrange(2**32),
        "follows_drafts": rng.random() < 0.5,
        "token_seconds": rng.choice([0.0, 0.0, 0.001]),
        "make_policy": rng.choice([None, ShortestFirst]),
        "make_order": rng.choice([None, LeastFrequentlyUsed]),
    }


def do_something(machine: MixtureMachine, rng: random.Random) -> None:
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


SUBSETS = [subset for size in range(6) for subset in itertools.combinations(FEATURES, size)]


@pytest.mark.parametrize("features", SUBSETS, ids="-".join)
def test_each_subset(features: tuple[str, ...]) -> None:
    for seed in range(examples(2)):
        machine, rng = MixtureMachine(), random.Random(f"{features} {seed}")
        machine.start(**random_options({*features}, rng))
        for _ in range(80):
            do_something(machine, rng)
        machine.teardown()


def make_engine(**options: Any) -> FakeEngine:
    """Return an engine with all groups, whose pool is large unless `options` say otherwise."""
    sizes = {"num_blocks": 400, "block_size": 4, "max_model_len": 200, "snapshot_interval": 16}
    groups = {"windows": (WindowSpec(6, 2), WindowSpec(20, 1)), "state_pages": 3}
    return FakeEngine(**{**sizes, **groups, **options})


def random_prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=length)


@pytest.mark.parametrize("queue_depth", [0, 1])
def test_the_next_turn_hits(queue_depth: int) -> None:
    """Symptom: windows and states are cached, each for itself, and their model hits nothing."""
    engine = make_engine(queue_depth=queue_depth)
    first = engine.add(random_prompt(1, 21), max_tokens=60, ignore_eos=True)
    engine.run()
    second = engine.add(first.token_ids + random_prompt(2, 5), max_tokens=30)
    engine.run()
    assert second.num_cached_tokens == 80


def test_a_hit_is_as_long_as_all_groups_can_serve() -> None:
    """What one group lacks shortens the hit, and then another group may lack what that needs."""
    engine = make_engine()
    seq = engine.add(random_prompt(3, 62), max_tokens=1)
    engine.run()
    nodes = engine.manager.match_prefix(seq).matched
    assert len(nodes) == 15
    assert engine.states is not None

    def hit() -> int:
        check_scheduler(engine.scheduler)
        return engine.manager.match_prefix(seq).num_blocks

    assert hit() == 15  # there are snapshots after 4, 8, 12 and 15 blocks
    engine.window_groups[0].forget(nodes[14], evicted=False)
    assert hit() == 12
    engine.window_groups[1].forget(nodes[8], evicted=False)  # token 48 reads 29 to 48
    assert hit() == 8
    engine.states.forget(nodes[7], evicted=False)
    assert hit() == 4
    engine.window_groups[0].forget(nodes[3], evicted=False)
    assert hit() == 0


@pytest.mark.parametrize("num_short", [1, 2, 4])
def test_an_allocation_is_all_or_nothing_over_all_groups(num_short: int) -> None:
    """The block table, the windows or the state are what lacks pages. Hits stay what they were."""
    engine = make_engine(num_blocks=400)
    seq = engine.add(random_prompt(4, 60), max_tokens=1)
    engine.run()
    manager = engine.manager
    hit = manager.match_prefix(seq)
    num_needed = sum(group.num_missing(seq, 61, hit) for group in manager.groups)
    taken = [manager.pool.take() for _ in range(manager.pool.num_free - num_needed + num_short)]
    hit = manager.match_prefix(seq)
    free = list(manager.pool.free)
    assert manager.allocate_blocks(seq, 61, hit) is None
    assert list(manager.pool.free) == free
    assert seq.kv.block_table == []
    manager.pool.release(taken[:num_short])
    assert manager.allocate_blocks(seq, 61, manager.match_prefix(seq)) is not None
