"""What a pool tells the tiers below it: the seam of `nanovllm/features/tiers`. It works without."""

from collections.abc import Sequence as Seq
from typing import Protocol

from nanovllm.kv.trie import Node
from nanovllm.scheduler.sequence import Sequence


class LowerTiers(Protocol):
    """Keeps copies of entries of the prefix cache below the pool.

    An entry is what a group has cached at a node of the trie. The group's `suffix` names its kind.
    """

    def evict(self, node: Node, suffix: bytes, pages: Seq[int]) -> None:
        """Learn that an entry leaves the cache to make room. Its pages hold it until the next step
        runs.
        """
        ...

    def reuse(self, page: int) -> None:
        """Learn that a page gets other contents in the next step."""
        ...

    def publish(self, seq: Sequence, first: int, nodes: Seq[Node]) -> None:
        """Learn that blocks of a sequence are cached: published, or hit.

        Args:
            first: index in the sequence of the first of them.
            nodes: where they are cached.
        """
        ...

    def keep(self, node: Node, suffix: bytes, pages: Seq[int]) -> None:
        """Learn that an entry of a prompt is cached, whose pages hold it now."""
        ...

    def distrust(self, nodes: Seq[Node]) -> None:
        """Forget nodes whose KV may be wrong, and never keep what is in them."""
        ...

    def clear(self) -> None:
        """Find nothing again that was kept so far."""
        ...
