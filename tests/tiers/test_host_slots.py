"""The index of host memory: no slot has two uses, and what is being loaded stays."""

from hypothesis import given, settings, strategies as st

from nanovllm.core.messages import TierEntry
from nanovllm.features.tiers.tier import HostSlots
from tests.every_case import examples


def put(host: HostSlots, name: str, num_pages: int = 1) -> TierEntry | None:
    return host.offer(name.encode(), list(range(num_pages)))


def names(host: HostSlots, of: str) -> str:
    return "".join(name for name in of if host.find(name.encode()))


def test_the_least_recently_used_entry_goes_first() -> None:
    host = HostSlots(3)
    for name in "abc":
        assert put(host, name)
    assert put(host, "a") is None  # it is there already, and is used again
    part = put(host, "d")
    assert part is not None
    assert names(host, "abcd") == "acd"
    assert part.slots == [1]  # that of b


def test_low_slots_are_used_first() -> None:
    """Symptom: all of host memory is touched, and so taken, by the first few entries."""
    host = HostSlots(100)
    first, second = put(host, "a", 2), put(host, "b")
    assert first is not None
    assert second is not None
    assert first.slots + second.slots == [0, 1, 2]


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.sampled_from(["offer", "begin", "end", "forget"]), st.integers(0, 5)),
        max_size=60,
    ),
    st.integers(1, 8),
)
def test_random_calls(calls: list[tuple[str, int]], num_slots: int) -> None:
    """An entry has 1 to 3 pages. Each slot is free, or of one entry that is found or loaded."""
    host = HostSlots(num_slots)
    slots: dict[bytes, list[int]] = {}  # as they were offered last
    loads: list[TierEntry] = []
    for call, number in calls:
        key = bytes([number])
        if call == "offer":
            part = host.offer(key, range(1 + number % 3))
            if part is not None:
                slots[key] = part.slots
                reading = {slot for load in loads for slot in load.slots}
                assert reading.isdisjoint(part.slots)
        elif call == "begin" and host.find(key):
            loads.append(host.begin(key))
            assert loads[-1].slots == slots[key]
        elif call == "end" and loads:
            host.end(loads.pop(number % len(loads)))
        elif call == "forget":
            host.forget(key)
        found = [slot for k, used in slots.items() if host.find(k) for slot in used]
        assert len({*found}) == len(found)
    for load in loads:
        host.end(load)
    host.clear()
    assert sorted(host._free) == list(range(num_slots))
