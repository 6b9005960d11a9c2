"""The prefix cache below the pool: what leaves the pool is kept, found, and comes back."""

import dataclasses
import os
from collections import Counter
from collections.abc import Collection, Sequence as Seq
from hashlib import sha256
from typing import NamedTuple

from nanovllm.core.messages import TierEntry
from nanovllm.core.sequence import Sequence
from nanovllm.features.tiers.traffic import TierTraffic
from nanovllm.kv.block_manager import BlockManager
from nanovllm.kv.groups.group import KVCacheGroup
from nanovllm.kv.pool import CacheListener
from nanovllm.kv.trie import Hit, Node

_MAX_DISTRUSTED = 10_000  # blocks of failed sequences that are remembered: a megabyte


class TierHit(NamedTuple):
    """An entry in a tier."""

    tier: str
    block_index: int  # of the block to which it belongs, in the sequence
    suffix: bytes
    key: bytes
    num_pages: int


@dataclasses.dataclass(slots=True, eq=False)
class Plan:
    """How a waiting sequence gets a prefix: from the pool, and by a load."""

    seq: Sequence
    num_blocks: int  # of the prefix
    found: list[TierHit]  # what is loaded, in the order of the blocks
    parts: list[TierEntry] = dataclasses.field(default_factory=list)
    """The same, pinned; with pages after the admission."""
    load_id: int = -1  # of the load in flight; -1 before
    is_resumption: bool = False  # whether the sequence had been preempted

    @property
    def places(self) -> list[tuple[int, bytes]]:
        """(block_index, suffix) of what is loaded."""
        return [(entry.block_index, entry.suffix) for entry in self.found]


def digest(data: bytes) -> bytes:
    """Return the hash that names a block wherever it is kept."""
    return sha256(data).digest()


class TierCache(CacheListener):
    """The tiers below a block manager, and what they have of the prefix cache.

    **Keys.** An entry's key is the chained hash of the block at whose end it stands, and a suffix
    for its kind. So it is the same in each process. After `cleared` a random number goes into all
    keys: what was kept before is not found again.

    **Failures.** A block of a failed sequence is never found or kept again until `cleared`. If
    there are more of them than `_MAX_DISTRUSTED`, all is cleared: so the set of them is small.

    **Out.** An entry that is evicted is offered to host memory while its pages still hold it: the
    workers copy it before anything else of the step. An entry within a prompt is offered to the
    store when it is cached, or hit.

    **In.** `plan` finds out whether the tiers have more of a prefix than the pool, and if loading
    it pays. Each entry that a hit needs may be in the pool or in a tier, whatever lies next to it.
    """

    def __init__(self, traffic: TierTraffic) -> None:
        self.traffic = traffic
        self._kept: set[int] = set()  # uids of the nodes whose entries the store was offered
        self._distrusted: set[bytes] = set()  # hashes of blocks of failed sequences
        self._nonce = b""

    def attach(self, manager: BlockManager) -> None:
        """Listen to a block manager."""
        assert manager.enable_prefix_caching
        self._manager = manager
        manager.trie.digest = digest
        manager.trie.followers.append(self)
        manager.pool.listener = self

    def evicted(self, node: Node, suffix: bytes, pages: Seq[int]) -> None:
        if node.key[1] not in self._distrusted:
            self.traffic.evict(self._key(node.key[1], suffix), pages)

    def reused(self, page: int) -> None:
        self.traffic.reuse(page)

    def published(self, seq: Sequence, first: int, nodes: Seq[Node]) -> None:
        """Offer the store what is within the prompt; also what is hit, which may be an answer."""
        if self.traffic.store is None:
            return
        num_prompt_blocks = seq.num_prompt_tokens // self._manager.block_size
        for node in nodes[: max(0, num_prompt_blocks - first)]:
            if node.uid not in self._kept:
                self._kept.add(node.uid)
                for group in self._manager.groups:
                    pages = group.kept_pages(node)
                    if pages:
                        self.written(node, group.suffix, pages)

    def written(self, node: Node, suffix: bytes, pages: Seq[int]) -> None:
        if node.key[1] not in self._distrusted:
            self.traffic.keep(self._key(node.key[1], suffix), pages)

    def distrusted(self, nodes: Seq[Node]) -> None:
        for node in nodes:
            self._distrusted.add(node.key[1])
            for group in self._manager.groups:
                self.traffic.forget(self._key(node.key[1], group.suffix))
        if len(self._distrusted) > _MAX_DISTRUSTED:
            self.cleared()

    def cleared(self) -> None:
        self._nonce = os.urandom(16)
        self._distrusted.clear()
        self.traffic.clear()

    def forget(self, node: Node, *, evicted: bool) -> None:
        """Forget that a node's entries were offered. See `trie.Follower`."""
        self._kept.discard(node.uid)

    # What loads ask:

    def plan(self, seq: Sequence, hit: Hit) -> Plan | None:
        """Return how to get a longer prefix than `hit`; None if there is none, or it is slow."""
        manager = self._manager
        matched = hit.matched
        num_missing = manager.blocks_for(len(seq.token_ids)) - len(matched)
        if num_missing > manager.num_free_blocks:  # it will not be admitted
            return None
        found = self._find_blocks(seq, len(matched))
        known: dict[tuple[bytes, int], TierHit | None] = {}

        def has(group: KVCacheGroup, index: int) -> bool:
            if index < len(matched) and group.has(matched[index]):
                return True
            place = group.suffix, index
            if place not in known:
                known[place] = self._find(seq.kv.block_keys[index][0], index, group)
            return known[place] is not None

        num_blocks = min(len(matched) + len(found), seq.longest_hit // manager.block_size)
        num_blocks = manager.longest_hit(num_blocks, has)
        if num_blocks <= hit.num_blocks:
            return None
        del found[max(0, num_blocks - len(matched)) :]
        for group in manager.groups[1:]:
            for index in reversed(group.needed(num_blocks)):
                entry = known.get((group.suffix, index))
                if entry is not None:
                    found.append(entry)
        found.sort(key=lambda entry: entry.block_index)
        num_pages: Counter[str] = Counter()
        for entry in found:
            num_pages[entry.tier] += entry.num_pages
        num_tokens = (num_blocks - hit.num_blocks) * manager.block_size
        return Plan(seq, num_blocks, found) if self.traffic.pays(num_pages, num_tokens) else None

    def waits_for(self, seq: Sequence, loading: Collection[bytes]) -> bool:
        """Return whether the next block that the pool lacks has its key in `loading`."""
        index = len(self._manager.trie.match(seq))
        num_blocks = seq.longest_hit // self._manager.block_size
        suffix = self._manager.full.suffix
        return index < num_blocks and self._key(seq.kv.block_keys[index][0], suffix) in loading

    def _find_blocks(self, seq: Sequence, first: int) -> list[TierHit]:
        """Return the KV blocks from index `first` on that the tiers have, up to a missing one or
        `Sequence.longest_hit`.
        """
        found = []
        size = self._manager.block_size
        keys = self._manager.trie.keys(seq, seq.longest_hit // size)
        for index in range(first, len(keys)):
            entry = self._find(keys[index][0], index, self._manager.full)
            if entry is None:
                break
            found.append(entry)
        return found

    def _find(self, digest: bytes, index: int, group: KVCacheGroup) -> TierHit | None:
        """Return a group's entry of a block, if a tier has it."""
        if digest in self._distrusted:
            return None
        key = self._key(digest, group.suffix)
        tier = self.traffic.find(key)
        if tier is None:
            return None
        return TierHit(tier, index, group.suffix, key, group.num_tables)

    def _key(self, digest: bytes, suffix: bytes) -> bytes:
        """Return the key of an entry of the block with this hash."""
        if self._nonce:
            digest = sha256(self._nonce + digest).digest()
        return digest + suffix
