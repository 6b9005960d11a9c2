"""An eviction order in one file: least frequently used first, with ageing.

nanovllm lab check examples.lab.lfu_eviction:LeastFrequentlyUsed
"""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import count

from nanovllm.kv.eviction import EvictionOrder
from nanovllm.scheduler.heap import Heap


class LeastFrequentlyUsed(EvictionOrder):
    """Reuses first the page with the fewest hits; of several, the one that was let go first.

    What was hit often long ago would stay for ever. So hits count from a base on, which is the
    rank of the last page that was reused (LFU with dynamic ageing: Arlitt et al., 1999).
    """

    def __init__(self, num_pages: int) -> None:
        self._empty: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))
        self._filled: Heap[int] = Heap()
        self._num_hits = [0] * num_pages
        self._ranks = [0] * num_pages  # when they were let go: the base, and their hits
        self._base = 0
        self._times = count()

    def __len__(self) -> int:
        return len(self._empty) + len(self._filled)

    def __contains__(self, page: object) -> bool:
        return page in self._empty or page in self._filled

    def __iter__(self) -> Iterator[int]:
        yield from self._empty
        yield from self._filled.in_order()

    def take(self) -> int:
        if self._empty:
            return self._empty.popitem(last=False)[0]
        page = self._filled.first()
        self._filled.remove(page)
        self._num_hits[page] = 0
        self._base = self._ranks[page]
        return page

    def put_first(self, page: int) -> None:
        if page in self._filled:
            self._filled.remove(page)
        self._num_hits[page] = 0
        self._empty[page] = None
        self._empty.move_to_end(page, last=False)

    def put_last(self, page: int) -> None:
        self._ranks[page] = self._base + self._num_hits[page]
        self._filled.set(page, (self._ranks[page], next(self._times)))

    def remove(self, page: int) -> None:
        self._filled.remove(page)

    def touch(self, page: int) -> None:
        self._num_hits[page] += 1
