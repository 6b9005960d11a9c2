"""The order in which a conversation prefers replicas."""

from collections import Counter

import pytest

pytest.importorskip("ray")

from nanovllm.apps.ray.affinity import FREE_REQUESTS, order

KEYS = [f"conversation {number}" for number in range(600)]
IDLE = dict.fromkeys("abcdef", 0)


def test_a_conversation_keeps_its_replica_whatever_the_others_do() -> None:
    for key in KEYS:
        first, second, *_ = order(key, IDLE)
        assert order(key, dict(reversed(IDLE.items())))[0] == first
        others = {name: 0 for name in IDLE if name != first}
        assert order(key, others)[0] == second, "only its own replica's end moves a conversation"
        assert order(key, {**IDLE, "new": 0})[0] in (first, "new")
        assert order(key, {**IDLE, first: FREE_REQUESTS - 1})[0] == first


def test_conversations_are_spread() -> None:
    counts = Counter(order(key, IDLE)[0] for key in KEYS)
    assert len(counts) == len(IDLE)
    assert max(counts.values()) < 1.4 * len(KEYS) / len(IDLE)


def test_a_busy_replica_comes_last_and_the_next_one_is_always_the_same() -> None:
    for key in KEYS:
        first, second, third, *_ = order(key, IDLE)
        assert order(key, {**IDLE, first: 20})[0] == second
        assert order(key, {**IDLE, first: 20, second: 30})[0] == third
        assert order(key, {**IDLE, first: 20, second: 30})[-2:] == [first, second]
        assert order(key, dict.fromkeys(IDLE, 100)) == order(key, IDLE), "all are as busy"
