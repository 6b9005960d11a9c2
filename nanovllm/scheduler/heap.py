"""`Heap`: items by key, of which any can be removed."""

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Heap(Generic[Item]):
    """Items by key, the lowest first. Any item can be removed, and its key changed.

    Entries of old keys stay in the heap until they come first, or until they are most of it.
    """

    def __init__(self) -> None:
        self._keys: dict[Item, tuple[int, ...]] = {}
        self._entries: list[tuple[tuple[int, ...], Item]] = []  # heap

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._keys)

    def __contains__(self, item: object) -> bool:
        return item in self._keys

    def in_order(self) -> Iterator[Item]:
        """Yield the items by key. The heap must not change meanwhile.

        The first k cost O(k log k), and O(n) entries of old keys at most are skipped.
        """
        frontier = [(self._entries[0], 0)] if self._entries else []
        last: Item | None = None
        while frontier:
            (key, item), index = heapq.heappop(frontier)
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(self._entries):
                    heapq.heappush(frontier, (self._entries[child], child))
            if self._keys.get(item) == key and item != last:  # it may have equal entries
                last = item
                yield item

    def set(self, item: Item, key: tuple[int, ...]) -> None:
        """Add an item, or change its key. Items must differ in their keys or be comparable."""
        if self._keys.get(item) != key:
            self._keys[item] = key
            heapq.heappush(self._entries, (key, item))
            self._drop_old_entries()

    def first(self) -> Item:
        """Return the item with the lowest key; there must be one."""
        while self._keys.get(self._entries[0][1]) != self._entries[0][0]:
            heapq.heappop(self._entries)
        return self._entries[0][1]

    def remove(self, item: Item) -> None:
        del self._keys[item]
        self._drop_old_entries()

    def _drop_old_entries(self) -> None:
        if len(self._entries) > 2 * len(self._keys) + 16:
            self._entries = [(key, item) for item, key in self._keys.items()]
            heapq.heapify(self._entries)
