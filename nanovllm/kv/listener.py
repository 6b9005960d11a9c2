"""What is told of the prefix cache: the seam of tiers below the pool."""

from collections.abc import Sequence as Seq

from nanovllm.core.sequence import Sequence
from nanovllm.kv.trie import Node


class CacheListener:
    """Learns what happens to pages and to entries of the prefix cache. By default it does nothing.

    An entry is what a group has cached at a node: a KV block, a window block or a snapshot. The
    `suffix` of an entry is its group's. Listeners are in `BlockPool.listeners`.
    """

    def reused(self, page: int) -> None:
        """A page gets other contents in the next step."""

    def evicted(self, node: Node, suffix: bytes, pages: Seq[int]) -> None:
        """An entry leaves the cache to make room. Its pages hold it until the next step runs."""

    def published(self, seq: Sequence, first: int, nodes: Seq[Node]) -> None:
        """Blocks of a sequence are cached now, or were hit.

        Args:
            first: block index of the first of `nodes`.
        """

    def written(self, node: Node, suffix: bytes, pages: Seq[int]) -> None:
        """A snapshot of a prompt's state is cached, and its pages hold it now."""

    def distrusted(self, nodes: Seq[Node]) -> None:
        """Blocks have left the cache because their KV may be wrong."""

    def cleared(self) -> None:
        """All that was cached is forgotten."""
