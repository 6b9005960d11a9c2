"""The prefix cache's keys: a trie of full blocks.

The key of a block is (unique id of its parent, hash of its tokens and of all before them). A hit
also compares the tokens, so a hash collision costs a miss and never gives a wrong prefix. Each
adapter and salt has a root and a trie of its own. Where tokens stand for other inputs, the digests
of these count as tokens do.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from xxhash import xxh3_128_digest

from nanovllm.core.messages import InputSpan
from nanovllm.core.sequence import Sequence

Key = tuple[int | str, bytes]
"""Of a node: (uid of its parent, or `Sequence.root_uid`; chained hash)."""


@dataclass(slots=True, eq=False)
class Node:
    """A full block of tokens whose KV is cached."""

    trie: "PrefixTrie"
    uid: int  # of the prefix that ends here; never reused
    key: Key
    tokens: bytes  # of the block, and what `_inputs_of` adds
    page: int  # of the layers with full attention

    def evict(self) -> None:
        """Leave the trie, because the page is reused."""
        self.trie.remove(self, evicted=True)


@dataclass(slots=True)
class Hit:
    """The prefix that an admission finds in the pool, or gets by a load."""

    matched: list[Node]  # all blocks of a prefix whose KV the pool has
    num_blocks: int = 0  # that need not be computed: what every group has, or will have
    # (block index, `Group.suffix`) of each entry that a load will fill and then cache
    loaded: frozenset[tuple[int, bytes]] = frozenset()

    @property
    def nodes(self) -> list[Node]:
        """The part of `matched` that is used."""
        return self.matched[: self.num_blocks]


class Follower(Protocol):
    """Caches something at the nodes of a trie."""

    def forget(self, node: Node, *, evicted: bool) -> None:
        """Forget what is cached at a node that leaves the trie: to make room if it is `evicted`,
        else because its KV may be wrong, or all is forgotten.
        """
        ...


class PrefixTrie:
    """Finds the cached blocks that a sequence begins with: none unless it `is_enabled`."""

    def __init__(self, block_size: int, *, is_enabled: bool = True) -> None:
        self.block_size = block_size
        self.is_enabled = is_enabled
        self.digest: Callable[[bytes], bytes] = xxh3_128_digest  # or a cryptographic one
        self.nodes: dict[Key, Node] = {}
        self.followers: list[Follower] = []
        self._uids = count(1)

    def keys(self, seq: Sequence, num_blocks: int) -> list[tuple[bytes, bytes]]:
        """Return (hash, tokens) of each of the first `num_blocks` blocks; hash each only once."""
        keys = seq.kv.block_keys
        for i in range(len(keys), num_blocks):
            first = i * self.block_size
            data = array("I", seq.token_ids[first : first + self.block_size]).tobytes()
            if seq.inputs:
                data += _inputs_of(seq.inputs, first, first + self.block_size)
            parent = keys[-1][0] if i else self.digest(seq.root_uid.encode())
            keys.append((self.digest(parent + data), data))
        return keys[:num_blocks]

    def match(self, seq: Sequence) -> list[Node]:
        """Return the longest chain of nodes that `seq` begins with.

        It never covers the last token: its hidden state is needed to sample the next one.
        """
        if not self.is_enabled:
            return []
        matched: list[Node] = []
        parent_uid: int | str = seq.root_uid
        for key_hash, tokens in self.keys(seq, (len(seq.token_ids) - 1) // self.block_size):
            node = self.nodes.get((parent_uid, key_hash))
            if node is None or node.tokens != tokens:
                break
            matched.append(node)
            parent_uid = node.uid
        return matched

    def chain(self, seq: Sequence) -> Iterator[Node]:
        """Yield the nodes of a sequence's published blocks. Their pages are not all in its block
        table: another sequence may have published an equal block first.
        """
        parent_uid: int | str = seq.root_uid
        for key_hash, _ in seq.kv.block_keys[: seq.kv.num_published_blocks]:
            node = self.nodes.get((parent_uid, key_hash))
            if node is None:
                return
            parent_uid = node.uid
            yield node

    def add(self, key: Key, tokens: bytes, page: int) -> Node:
        """Add a block whose KV is in `page`; its key must be new."""
        node = self.nodes[key] = Node(self, next(self._uids), key, tokens, page)
        return node

    def remove(self, node: Node, *, evicted: bool) -> None:
        """Remove a node, and what followers have cached there. See `Follower.forget`."""
        del self.nodes[node.key]
        for follower in self.followers:
            follower.forget(node, evicted=evicted)


def _inputs_of(spans: Iterable[InputSpan], first: int, end: int) -> bytes:
    """Return what tells the inputs of a block apart: 56 bytes for each span that it has a part of.

    They are the digest, where the part begins in what the digest is of, and its positions.
    """
    found = b""
    for span in spans:
        start = max(span.start, first)
        stop = min(span.end, end)
        if start < stop:
            assert len(span.digest) == 32
            place = array("Q", [span.offset + start - span.start, start, stop])
            found += span.digest + place.tobytes()
    return found
