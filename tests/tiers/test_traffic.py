"""What a step moves, and whether a load pays."""

from collections import Counter

import pytest

from nanovllm.core.messages import HOST, STORE, Loaded, TierEntry, Transfers
from nanovllm.features.tiers.tier import HostSlots, StoreTier
from nanovllm.features.tiers.traffic import TierTraffic
from tests.tiers.fake_tiers import FakeStore


def make_traffic(
    num_slots: int = 4, token_seconds: float = 0.0, page_seconds: float = 0.0
) -> tuple[TierTraffic, FakeStore]:
    store = FakeStore()
    host = HostSlots(num_slots, page_seconds)
    return TierTraffic(host, StoreTier(store.has), token_seconds=token_seconds), store


def take(traffic: TierTraffic) -> Transfers:
    return traffic.take([], awaited=False)


def test_a_page_that_is_reused_is_not_written() -> None:
    traffic, _ = make_traffic()
    traffic.keep(b"a", [1, 2])
    traffic.keep(b"b", [3])
    traffic.reuse(2)
    moved = take(traffic)
    assert moved.stores == [TierEntry(STORE, b"b", [3], [])]
    assert moved.released == []


def test_a_page_is_released_once_for_each_write() -> None:
    traffic, _ = make_traffic()
    traffic.keep(b"a", [1])
    assert take(traffic).released == []
    traffic.reuse(1)
    traffic.reuse(2)
    assert take(traffic).released == [1]
    traffic.reuse(1)
    assert take(traffic).released == []


def test_what_the_store_has_is_not_written_again_unless_it_is_damaged() -> None:
    traffic, store = make_traffic()
    store.entries[b"a"] = None
    traffic.keep(b"a", [1])
    assert not traffic.has_unsent
    parts = [traffic.begin(STORE, b"a")]
    traffic.end(parts, Loaded(0, 0, 0.1))
    assert traffic.find(b"a") is None
    traffic.keep(b"a", [1])
    assert traffic.has_unsent
    assert traffic.find(b"a") == STORE


def test_a_failed_step_stores_nothing_and_releases_again() -> None:
    traffic, _ = make_traffic()
    traffic.keep(b"x", [9])
    take(traffic)
    traffic.reuse(9)
    traffic.evict(b"a", [1])
    moved = take(traffic)
    traffic.evict(b"b", [2])  # of a copy that the failed step should have made
    traffic.undo(moved)
    assert traffic.find(b"a") is None
    assert traffic.find(b"b") is None
    again = take(traffic)
    assert again.released == [9]
    assert again.stores == []


def test_a_load_that_is_given_up_is_over_before_the_next_step() -> None:
    traffic, _ = make_traffic(num_slots=1)
    traffic.evict(b"a", [1])
    parts = [traffic.begin(HOST, b"a")._replace(pages=[5])]
    traffic.evict(b"b", [2])
    assert traffic.find(b"b") is None  # the slot is pinned
    traffic.give_up(parts)
    traffic.evict(b"b", [2])
    assert traffic.find(b"b") == HOST
    assert take(traffic).released == [5]


def test_a_slow_tier_is_tried_again() -> None:
    """By admissions. A prompt that only waits for pages, and asks at each step, changes nothing."""
    traffic, _ = make_traffic(token_seconds=0.001)
    parts = [TierEntry(STORE, b"a", [1], [])]
    assert traffic.pays(Counter({STORE: 1}), 16)
    traffic.end(parts, Loaded(0, 1, 0.1))
    tries = 0
    while not any(traffic.pays(Counter({STORE: 1}), 16) for _ in range(100)):
        traffic.retry_slow()
        tries += 1
    assert 1 < tries < 30


def test_what_a_mixed_load_took_is_the_stores() -> None:
    traffic, _ = make_traffic(token_seconds=0.001, page_seconds=0.01)
    traffic.evict(b"a", [1])
    parts = [traffic.begin(HOST, b"a")._replace(pages=[5]), TierEntry(STORE, b"b", [6, 7], [])]
    traffic.end(parts, Loaded(0, 2, 0.05))
    assert [tier.page_seconds for tier in traffic.tiers] == pytest.approx([0.01, 0.02])


def test_memory_of_failed_loads_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: a process with a damaged store grows for as long as it runs."""
    monkeypatch.setattr("nanovllm.features.tiers.tier._MAX_FORGOTTEN", 50)
    tier = StoreTier(lambda key: True)
    keys = [number.to_bytes(36, "big") for number in range(300)]
    for key in keys:
        tier.forget(key)
        tier.forget(key)  # two loads had it
        assert len(tier._forgotten) <= 50
    assert not any(tier.find(key) for key in keys[-50:])
    assert tier.offer(keys[-1], [7]) == TierEntry(STORE, keys[-1], [7], [])
    assert tier.find(keys[-1])
