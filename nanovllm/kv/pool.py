"""The pages of a KV pool: who uses them, and in which order the free ones are reused."""

from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from nanovllm.core.sequence import Sequence
from nanovllm.errors import PluginError
from nanovllm.kv.eviction import EvictionOrder, LeastRecentlyUsed
from nanovllm.kv.trie import Node


class Entry(Protocol):
    """What the prefix cache holds in one or more pages."""

    def evict(self) -> None:
        """Leave the prefix cache, because one of the pages is reused."""
        ...


@dataclass(slots=True, eq=False)
class Block:
    """A page of the pool."""

    ref_count: int = 0  # of its users; at 0 the page is free
    entry: Entry | None = None  # of a free page, too: a hit can revive it until the page is reused


class CacheListener:
    """Learns what happens to pages and to entries of the prefix cache. By default it does nothing.

    An entry is what a group has cached at a node: a KV block, a window block or a snapshot. The
    `suffix` of an entry is its group's. `BlockPool.listener` is the one that listens.
    """

    def reused(self, page: int) -> None:
        """A page gets other contents in the next step."""

    def evicted(self, node: Node, suffix: bytes, pages: Seq[int]) -> None:
        """An entry leaves the cache to make room. Its pages hold it until the next step runs."""

    def published(self, seq: Sequence, first: int, nodes: Seq[Node]) -> None:
        """Blocks of a sequence, from index `first` on, are cached now, or were hit."""

    def written(self, node: Node, suffix: bytes, pages: Seq[int]) -> None:
        """A snapshot of a prompt's state is cached, and its pages hold it now."""

    def distrusted(self, nodes: Seq[Node]) -> None:
        """Blocks have left the cache because their KV may be wrong."""

    def cleared(self) -> None:
        """All that was cached is forgotten."""


class BlockPool:
    """Equal pages, for all groups of layers together.

    Invariants, verified by nanovllm/testing/invariants.py:
    - A page is free, and in the eviction order, if and only if its `ref_count` is 0.
    - A page has one use: it is in the block table of one group, or holds one entry.
    - Free pages without an entry are reused before those with one.

    Every operation costs O(1), or what the eviction order takes. Groups and the block manager tell
    the `listener`, too.

    Args:
        order: of the free pages, for `num_blocks` pages; None: least recently used first.
    """

    def __init__(self, num_blocks: int, *, order: EvictionOrder | None = None) -> None:
        self.blocks = [Block() for _ in range(num_blocks)]
        self.free: EvictionOrder = LeastRecentlyUsed(num_blocks) if order is None else order
        self.listener = CacheListener()

    @property
    def num_free(self) -> int:
        return len(self.free)

    def take(self) -> int:
        """Return a free page for new contents; there must be one. Its entry leaves the cache.

        Raises:
            PluginError: the eviction order gives a page that is in use.
        """
        page = self.free.take()
        block = self.blocks[page]
        if block.ref_count:  # two sequences would read each other's KV
            raise PluginError.of("eviction_policy", f"take() returned page {page}, which is in use")
        block.ref_count = 1
        if block.entry is not None:
            block.entry.evict()
        self.listener.reused(page)
        return page

    def hold(self, pages: Seq[int]) -> None:
        """Count one user more of pages whose entry is hit."""
        for page in pages:
            block = self.blocks[page]
            if block.ref_count == 0:
                self.free.remove(page)
            block.ref_count += 1
            self.free.touch(page)

    def release(self, pages: Iterable[int]) -> None:
        """Count one user less of pages. At 0 a page is free, and reused last if it has an entry."""
        for page in pages:
            block = self.blocks[page]
            block.ref_count -= 1
            if block.ref_count:
                continue
            if block.entry is None:
                self.free.put_first(page)
            else:
                self.free.put_last(page)

    def clear(self, page: int) -> None:
        """Remove a page's entry. If the page is free it is reused first."""
        block = self.blocks[page]
        block.entry = None
        if block.ref_count == 0:
            self.free.put_first(page)

    def rewrite(self, pages: Seq[int]) -> None:
        """Give pages in use other contents in the next step; their entry has left the cache."""
        for page in pages:
            self.clear(page)
            self.listener.reused(page)
