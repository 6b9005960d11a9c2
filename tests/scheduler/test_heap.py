"""`Heap`: items by key, each of them once."""

from hypothesis import given, settings, strategies as st

from nanovllm.scheduler.heap import Heap

OPERATIONS = st.lists(st.tuples(st.sampled_from("abc"), st.none() | st.integers(0, 5)), max_size=20)


@settings(deadline=None, derandomize=True)
@given(operations=OPERATIONS)
def test_items_come_once_and_in_order(operations: list[tuple[str, int | None]]) -> None:
    """Symptom: an item that was removed and came back with its old key is yielded twice."""
    heap: Heap[str] = Heap()
    keys: dict[str, tuple[int, str]] = {}
    for name, number in operations:
        item = "".join(["item ", name])  # equal to others of this name, and another object
        if number is not None:
            keys[item] = (number, name)
            heap.set(item, (number, ord(name)))
        elif item in keys:
            del keys[item]
            heap.remove(item)
    expected = sorted(keys, key=lambda item: keys[item])
    assert list(heap.in_order()) == expected
    assert not expected or heap.first() == expected[0]
