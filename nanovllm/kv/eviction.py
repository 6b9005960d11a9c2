"""In which order free pages are reused: the seam of eviction policies, and LRU."""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator


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
