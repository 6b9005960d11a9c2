"""`Hit`: the prefix of a sequence that need not be computed."""

import dataclasses

from nanovllm.kv.trie import Node


@dataclasses.dataclass(slots=True)
class Hit:
    """The prefix that an admission finds in the pool, or gets by a load."""

    matched: list[Node]
    """All blocks of a prefix whose KV the pool has."""
    num_blocks: int = 0
    """Of the prefix that need not be computed: what every group has, or will have."""
    loaded: frozenset[tuple[int, bytes]] = frozenset()
    """(block index, `Group.suffix`) of each entry that a load fills, and that is new until then."""

    @property
    def nodes(self) -> list[Node]:
        """The part of `matched` that is used."""
        return self.matched[: self.num_blocks]
