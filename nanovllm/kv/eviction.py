"""In which order free pages are reused: the seam of eviction policies, LRU, and the rules of
an order of the user's.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator

from nanovllm.errors import BrokenRule


class EvictionOrder(ABC):
    """The free pages of a pool, in the order in which they are reused.

    The pool calls it; nothing else does. Each operation should cost O(1), or O(log n). A page is a
    number from 0 on. Pages that hold nothing must be taken before those that hold something, in
    ascending order at first: memory that was never touched costs nothing.

    Args:
        num_pages: pages of the pool. All are free at first, and hold nothing.
    """

    @abstractmethod
    def __init__(self, num_pages: int) -> None: ...

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of free pages."""

    @abstractmethod
    def __contains__(self, page: object) -> bool:
        """Return whether a page is free."""

    @abstractmethod
    def __iter__(self) -> Iterator[int]:
        """Yield the free pages in order. Only tests need it."""

    @abstractmethod
    def take(self) -> int:
        """Remove the first page and return it: what it holds is gone. There is at least one."""

    @abstractmethod
    def put_first(self, page: int) -> None:
        """Add a page that holds nothing, or move it there if it is free already."""

    @abstractmethod
    def put_last(self, page: int) -> None:
        """Add a page that holds something, whose last user has just let it go."""

    @abstractmethod
    def remove(self, page: int) -> None:
        """Remove a free page: somebody uses it again."""

    def touch(self, page: int) -> None:  # noqa: B027  # not every order counts hits
        """Note a hit of what a page holds. If the page was free, `remove` came first."""


class LeastRecentlyUsed(EvictionOrder):
    """Reuses pages that hold nothing first, and then the page that was let go first."""

    def __init__(self, num_pages: int) -> None:
        self._pages: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, page: object) -> bool:
        return page in self._pages

    def __iter__(self) -> Iterator[int]:
        return iter(self._pages)

    def take(self) -> int:
        return self._pages.popitem(last=False)[0]

    def put_first(self, page: int) -> None:
        self._pages[page] = None
        self._pages.move_to_end(page, last=False)

    def put_last(self, page: int) -> None:
        self._pages[page] = None

    def remove(self, page: int) -> None:
        del self._pages[page]


class OrderRules:
    """What an order of the user's must return: see `nanovllm.options.plugins.Guarded`.

    They count the free pages themselves, so no page is lost, or has two users, unnoticed.

    Args:
        order: the one that decides, for `num_pages` pages.
    """

    def __init__(self, order: EvictionOrder, num_pages: int) -> None:
        self._order = order
        self._is_free = [True] * num_pages
        self._num_free = num_pages
        self._check_len("__init__()")

    def take(self, page: int) -> int:
        if not isinstance(page, int) or not 0 <= page < len(self._is_free):
            rule = f"return a page from 0 to {len(self._is_free) - 1} that is free"
            raise BrokenRule(f"take() returned {page!r:.80}: {rule}")
        if not self._is_free[page]:
            raise BrokenRule(f"take() returned page {page}, which is in use")
        self._set(page, is_free=False)
        self._check_len("take()")
        return page

    def put_first(self, _: None, page: int) -> None:
        self._set(page, is_free=True)
        self._check_len(f"put_first({page})")

    def put_last(self, _: None, page: int) -> None:
        self._set(page, is_free=True)
        self._check_len(f"put_last({page})")

    def remove(self, _: None, page: int) -> None:
        self._set(page, is_free=False)
        self._check_len(f"remove({page})")

    def _set(self, page: int, *, is_free: bool) -> None:
        self._num_free += is_free - self._is_free[page]
        self._is_free[page] = is_free

    def _check_len(self, call: str) -> None:
        num_free = len(self._order)
        if num_free != self._num_free:
            raise BrokenRule(
                f"after {call} it has {num_free} pages, but {self._num_free} of "
                f"{len(self._is_free)} are free: it must hold each free page once, and no other"
            )
