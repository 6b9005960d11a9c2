"""An eviction order decides which cached KV makes room. This one keeps what was hit before.

Run it in the folder of this file:

    PYTHONPATH=. nanovllm serve MODEL --eviction-policy my_eviction:MyEviction

The contract is nanovllm/kv/eviction.py; docs/plugins.md has the rules.
"""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain

from nanovllm.kv.eviction import EvictionOrder


class MyEviction(EvictionOrder):
    """Reuses empty pages first, then pages that were never hit, then the others; each by age.

    It holds the free pages of the pool: each of them once, and no other. `nanovllm lab check` finds
    the call that loses a page or gives it out twice.
    """

    def __init__(self, num_pages: int) -> None:
        # At first all pages are free and empty. They must go in ascending order.
        self._empty: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))
        self._once: OrderedDict[int, None] = OrderedDict()
        self._often: OrderedDict[int, None] = OrderedDict()
        self._was_hit = [False] * num_pages

    def __len__(self) -> int:
        return len(self._empty) + len(self._once) + len(self._often)

    def __contains__(self, page: object) -> bool:
        return page in self._empty or page in self._once or page in self._often

    def __iter__(self) -> Iterator[int]:
        return chain(self._empty, self._once, self._often)

    def take(self) -> int:
        """Return a page for new contents; what it held is forgotten. At least one is free."""
        page, _ = (self._empty or self._once or self._often).popitem(last=False)
        self._was_hit[page] = False
        return page

    def put_first(self, page: int) -> None:
        """Take back a page that holds nothing any more. It may be free already."""
        self._once.pop(page, None)
        self._often.pop(page, None)
        self._was_hit[page] = False
        self._empty[page] = None
        self._empty.move_to_end(page, last=False)

    def put_last(self, page: int) -> None:
        """Take back a page that the prefix cache still finds: its last user has gone."""
        (self._often if self._was_hit[page] else self._once)[page] = None

    def remove(self, page: int) -> None:
        """Give up a free page: a hit uses it again."""
        (self._often if page in self._often else self._once).pop(page)

    def touch(self, page: int) -> None:
        """Note a hit of a page, free or not. It comes after `remove`."""
        self._was_hit[page] = True
