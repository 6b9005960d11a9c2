"""Copies of states in the prefix cache. Knows no tensors."""

import dataclasses
from collections import OrderedDict

from nanovllm.scheduler.block_manager import Block, BlockManager


@dataclasses.dataclass(slots=True, eq=False)
class Snapshot:
    """A copy of a sequence's state, as it is behind the sequence's first `position` tokens.

    It is cached if and only if it has a `uid`: that of the cached KV block that ends at `position`.
    It has no pages until its copy is scheduled. A dropped one has no use any more.
    """

    position: int
    is_rolling: bool
    is_dropped: bool = False
    pages: list[int] = dataclasses.field(default_factory=list)
    uid: int | None = None


class SnapshotCache(BlockManager):
    """Caches snapshots of states beside KV blocks. They share free pages, and one LRU order.

    Invariants, beside those of `BlockManager`, verified by tests/scheduler/invariants.py:
    - A cached snapshot's block is cached, too. They leave the cache together.
    - The pages of a snapshot are all held, by the snapshot alone, or all free.
    - A page has one use.

    Args:
        num_blocks: number of pages, of KV blocks and states together.
        state_pages: pages of a state.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        state_pages: int,
        enable_prefix_caching: bool = True,
    ) -> None:
        super().__init__(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching)
        self.state_pages = state_pages
        self._snapshots: dict[int, Snapshot] = {}  # the cached ones, by uid
        self._snapshot_pages: dict[int, Snapshot] = {}  # by page
        self._held: OrderedDict[Snapshot, None] = OrderedDict()  # whose pages are not free

    @property
    def num_free_blocks(self) -> int:
        return len(self._free) + len(self._held) * self.state_pages

    def _has_room(self, reserve: int) -> bool:
        """Return whether a snapshot leaves `reserve` pages free."""
        return self.enable_prefix_caching and len(self._free) >= self.state_pages + reserve

    def _make_room(self, num_pages: int) -> bool:
        """Drop held snapshots until `num_pages` pages are free, or none if these do not suffice."""
        if num_pages > self.num_free_blocks:
            return False
        while num_pages > len(self._free):
            self._drop(next(iter(self._held)))
        return True

    def _must_give_pages(self, hit: Snapshot, num_missing: int) -> bool:
        """Return whether an admission that takes `num_missing` pages leaves none to a snapshot.

        If it leaves enough, the snapshot's pages are the last to be taken.
        """
        if hit in self._held:
            return num_missing > len(self._free)
        for page in hit.pages:
            self._free.move_to_end(page)
        return num_missing + self.state_pages > len(self._free)

    def _take_over(self, hit: Snapshot) -> list[int]:
        """Return the pages of a snapshot, which is no more."""
        pages = hit.pages
        if hit not in self._held:
            for page in pages:
                del self._free[page]
                self.blocks[page].ref_count = 1
        self._forget(hit)
        return pages

    def _take_state_pages(self) -> list[int]:
        return [self._take_free_block() for _ in range(self.state_pages)]

    def _hold(self, snapshot: Snapshot, pages: list[int]) -> None:
        """Give a snapshot pages, which are not free."""
        snapshot.pages = pages
        self._snapshot_pages.update(dict.fromkeys(pages, snapshot))
        self._held[snapshot] = None

    def _let_go(self, snapshot: Snapshot) -> None:
        """Free the pages of a snapshot, which stays cached until they are reused."""
        del self._held[snapshot]
        for page in snapshot.pages:
            self.blocks[page].ref_count = 0
            self._free[page] = None

    def _drop(self, snapshot: Snapshot) -> None:
        """Forget a snapshot, and free its pages."""
        if not snapshot.is_dropped:
            self._forget(snapshot)
            self._free_uncached(snapshot.pages)

    def _forget(self, snapshot: Snapshot) -> None:
        """Remove a snapshot from the cache. Its pages have no owner then."""
        snapshot.is_dropped = True
        self._held.pop(snapshot, None)
        for page in snapshot.pages:
            del self._snapshot_pages[page]
        if snapshot.uid is not None:
            del self._snapshots[snapshot.uid]

    def _take_free_block(self) -> int:
        page = super()._take_free_block()
        evicted = self._snapshot_pages.get(page)
        if evicted is not None:
            self._forget(evicted)
            self._free_uncached([other for other in evicted.pages if other != page])
        return page

    def _uncache(self, block: Block) -> None:
        snapshot = None if block.uid is None else self._snapshots.get(block.uid)
        if snapshot is not None:
            self._drop(snapshot)
        super()._uncache(block)
