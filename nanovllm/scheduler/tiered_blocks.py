"""What tiers add to a block manager: the blocks that left the pool are found, and come back.

`TieredBlocks` goes before a block manager in a class's bases; tiered_windows.py and
tiered_states.py have what window blocks and snapshots need beside it. Knows no tensors, and no
steps.
"""

import dataclasses
import os
from collections import Counter
from collections.abc import Collection, Sequence as Seq
from hashlib import sha256
from typing import Any, NamedTuple

from nanovllm.scheduler.block_manager import Block, BlockManager
from nanovllm.scheduler.cached_chain import cached_chain
from nanovllm.scheduler.sequence import Sequence
from nanovllm.scheduler.tier_traffic import TierTraffic
from nanovllm.scheduler.transfers import Part

KV = b""
"""Ends the key of a KV block. Another entry has a suffix of its own."""


class Found(NamedTuple):
    """An entry in a tier."""

    tier: str
    block_index: int
    """Of the block to which it belongs, in the sequence."""
    suffix: bytes
    key: bytes
    num_pages: int


@dataclasses.dataclass(slots=True, eq=False)
class Plan:
    """How a waiting sequence gets a prefix: from the pool, and by a load."""

    seq: Sequence
    num_pooled: int
    """Blocks that the pool has."""
    num_blocks: int
    """Blocks of the prefix."""
    found: list[Found]
    """What is loaded, in the order of the blocks."""
    parts: list[Part] = dataclasses.field(default_factory=list)
    """The same with pages; empty before the admission."""
    load_id: int = -1
    """Of the load in flight; -1 before."""
    is_resumption: bool = False
    """Whether the sequence had been preempted."""
    places: set[tuple[int, bytes]] = dataclasses.field(init=False)
    """(block_index, suffix) of what is loaded."""

    def __post_init__(self) -> None:
        self.places = {(entry.block_index, entry.suffix) for entry in self.found}


def digest(data: bytes) -> bytes:
    """Return the hash that names a block wherever it is kept."""
    return sha256(data).digest()


class TieredBlocks(BlockManager):
    """A block manager with tiers below it, by itself that of a model that has KV blocks alone.

    An entry is a KV block, a window block or a snapshot.

    Invariants, beside those of its bases, verified by tests/scheduler/invariants.py:
    - `_digests` has the hashes of exactly the cached blocks, by uid.
    - A block that is being loaded is not cached. So nobody hits it before its KV is there.

    **Keys.** An entry's key is the chained hash of the block at whose end it stands, and a suffix
    for its kind. So it is the same in each process. After `reset_prefix_cache` a random number goes
    into all keys: what was kept before is not found again.

    **Out.** An entry that is evicted is offered to host memory while its pages still hold it: the
    workers copy it before anything else of the step. An entry within a prompt is offered to the
    store when it is cached, or hit.

    **In.** `match_prefix` plans a load if the tiers have more of a prefix than the pool, and if
    that pays. `allocate_blocks` carries the plan out, and `take_plan` tells the scheduler.

    Args:
        traffic: the tiers.
        args, options: of the block manager.
    """

    def __init__(self, *args: Any, traffic: TierTraffic, **options: Any) -> None:
        super().__init__(*args, **options)
        assert self.enable_prefix_caching
        self.digest = digest
        self.traffic = traffic
        self._digests: dict[int, bytes] = {}
        self._kept: set[int] = set()  # uids of the cached blocks that the store was offered
        self._distrusted: set[bytes] = set()  # hashes of blocks of failed sequences
        self.without_loads: set[Sequence] = set()  # unfinished, those with a load that failed
        self._nonce = b""
        self._plan: Plan | None = None  # of the last `match_prefix`
        self._admitted: Plan | None = None  # of the admission that runs, up to `take_plan`
        self._is_evicting = False

    def match_prefix(self, seq: Sequence) -> list[int]:
        """Return the pool's blocks of the longest prefix that can be had: see `Plan`."""
        self._plan = None
        hit = super().match_prefix(seq)
        pooled = BlockManager.match_prefix(self, seq)
        num_missing = self.blocks_for(len(seq.token_ids)) - len(pooled)
        if (
            seq in self.without_loads or num_missing > self.num_free_blocks
        ):  # it will not be admitted
            return hit
        plan = self._make_plan(seq, hit, pooled)
        if plan is None:
            return hit
        self._plan = plan
        return pooled[: plan.num_pooled]

    def allocate_blocks(
        self, seq: Sequence, num_tokens: int, cached_blocks: Seq[int] = ()
    ) -> list[int] | None:
        """Extend a sequence's block table. For an admission carry out what was planned."""
        if seq.block_table:
            return super().allocate_blocks(seq, num_tokens, cached_blocks)
        plan, self._plan = self._plan, None
        if plan is None or plan.seq is not seq:
            plan = Plan(seq, len(cached_blocks), len(cached_blocks), [])
        # What is to be loaded must survive the evictions that make room for it.
        parts = [self.traffic.begin(entry.tier, entry.key) for entry in plan.found]
        self._admitted = plan
        appended = super().allocate_blocks(seq, num_tokens, cached_blocks)
        if appended is None:
            self._admitted = None
            self.traffic.unpin(parts)
            return None
        self._take_pages(seq, plan)
        for entry, part in zip(plan.found, parts, strict=True):
            plan.parts.append(part._replace(pages=self._pages_of(seq, entry)))
        self._offer_prompt(seq, 0, seq.root_uid)
        return appended

    def take_plan(self) -> Plan | None:
        """End an admission; return the load that it needs, None if it needs none."""
        plan, self._admitted = self._admitted, None
        return plan if plan is not None and plan.parts else None

    def publish(self, seq: Sequence, num_written: int) -> None:
        """Cache full blocks, and offer those of the prompt to the store."""
        first, parent = seq.num_published_blocks, seq.parent_uid
        super().publish(seq, num_written)
        self._offer_prompt(seq, first, parent)

    def publish_loaded(self, plan: Plan, num_parts: int) -> None:
        """Cache the blocks whose entries are among the first `num_parts` of a load."""
        index = plan.num_blocks
        if num_parts < len(plan.found):
            index = plan.found[num_parts].block_index
        self.publish(plan.seq, index * self.block_size)

    def free(self, seq: Sequence, *, keep_cached: bool = True) -> None:
        """Free all blocks of a sequence. Without `keep_cached` the tiers forget them, too."""
        chain = [] if keep_cached else list(cached_chain(self, seq, 0, seq.root_uid))
        digests = {uid: self._digests[uid] for uid, _ in chain}
        super().free(seq, keep_cached=keep_cached)
        for uid in digests.keys() - self._digests.keys():
            self._distrusted.add(digests[uid])
            for suffix in self._suffixes():
                self.traffic.forget(self._key(digests[uid], suffix))

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks, and find nothing that the tiers have of before."""
        if not super().reset_prefix_cache():
            return False
        self._nonce = os.urandom(16)
        self._distrusted.clear()
        self.traffic.clear()
        return True

    def waits_for(self, seq: Sequence, loading: Collection[bytes]) -> bool:
        """Return whether the next block that the pool lacks of a prefix is one of `loading`.

        Args:
            loading: keys.
        """
        if seq.params.prompt_logprobs is not None:  # it hits nothing
            return False
        index = len(BlockManager.match_prefix(self, seq))
        num_blocks = (len(seq.token_ids) - 1) // self.block_size
        return index < num_blocks and self._key(seq.block_keys[index][0], KV) in loading

    def _make_plan(self, seq: Sequence, hit: list[int], pooled: list[int]) -> Plan | None:
        """Return how to get a longer prefix than `hit`; None if there is none, or it is slow.

        Args:
            hit: what the pool gives without a load.
            pooled: the KV blocks that it has.
        """
        found = self._find_blocks(seq, len(pooled))
        num_blocks, more = self._reach(seq, len(hit), pooled, len(pooled) + len(found))
        if num_blocks <= len(hit):
            return None
        found = [*found[: max(0, num_blocks - len(pooled))], *more]
        found.sort(key=lambda entry: entry.block_index)
        num_pages: Counter[str] = Counter()
        for entry in found:
            num_pages[entry.tier] += entry.num_pages
        if not self.traffic.pays(num_pages, (num_blocks - len(hit)) * self.block_size):
            return None
        return Plan(seq, min(num_blocks, len(pooled)), num_blocks, found)

    def _find_blocks(self, seq: Sequence, first: int) -> list[Found]:
        """Return the KV blocks from index `first` on that the tiers have, up to a missing one.

        The last token is never among them: its hidden state is needed to sample the next one.
        """
        found = []
        keys = self._block_keys(seq, (len(seq.token_ids) - 1) // self.block_size)
        for index in range(first, len(keys)):
            entry = self._find(keys[index][0], index, KV, 1)
            if entry is None:
                break
            found.append(entry)
        return found

    def _find(self, digest: bytes, index: int, suffix: bytes, num_pages: int) -> Found | None:
        """Return an entry of a block, if a tier has it."""
        if digest in self._distrusted:
            return None
        key = self._key(digest, suffix)
        tier = self.traffic.find(key)
        return None if tier is None else Found(tier, index, suffix, key, num_pages)

    def _key(self, digest: bytes, suffix: bytes) -> bytes:
        """Return the key of an entry of the block with this hash."""
        if self._nonce:
            digest = sha256(self._nonce + digest).digest()
        return digest + suffix

    def _offer_prompt(self, seq: Sequence, first: int, parent_uid: int | str | None) -> None:
        """Note the hashes of a sequence's cached blocks from `first` on, and offer the prompt's.

        Another sequence's answer may be this one's prompt. So blocks that are hit are offered, too.
        """
        num_prompt_blocks = seq.num_prompt_tokens // self.block_size
        for index, (uid, page) in enumerate(cached_chain(self, seq, first, parent_uid), first):
            digest = self._digests[uid] = seq.block_keys[index][0]
            if index < num_prompt_blocks and self.traffic.store and uid not in self._kept:
                self._kept.add(uid)
                if digest not in self._distrusted:
                    self._keep_entries(uid, digest, page)

    def _take_free_block(self) -> int:
        page = next(iter(self._free))
        key = self.blocks[page].key
        if key is not None:
            self._evict(key[1], KV, [page])
        self._is_evicting = True
        super()._take_free_block()
        self._is_evicting = False
        self.traffic.reuse(page)
        return page

    def _evict(self, digest: bytes, suffix: bytes, pages: Seq[int]) -> None:
        """Offer an entry to host memory, while its pages hold it until the next step."""
        if digest not in self._distrusted:
            self.traffic.evict(self._key(digest, suffix), pages)

    def _uncache(self, block: Block) -> None:
        uid = block.uid
        super()._uncache(block)
        if uid is not None:
            del self._digests[uid]
            self._kept.discard(uid)

    def hit_position(self, cached_blocks: Seq[int]) -> int:
        num_blocks = len(cached_blocks) if self._admitted is None else self._admitted.num_blocks
        return num_blocks * self.block_size

    # What another kind of entry adds:

    def _suffixes(self) -> list[bytes]:
        """Return the suffixes of all kinds of entries."""
        return [KV]

    def _reach(
        self, seq: Sequence, num_hit: int, pooled: list[int], num_blocks: int
    ) -> tuple[int, list[Found]]:
        """Return the longest prefix that can be had, in blocks, and what to load beside KV blocks.

        Args:
            num_hit: blocks of the prefix that needs no load; a shorter one is of no use.
            pooled: the KV blocks that the pool has.
            num_blocks: of the longest prefix whose KV blocks the pool and the tiers have.
        """
        return num_blocks, []

    def _take_pages(self, seq: Sequence, plan: Plan) -> None:
        """Take those pages for a load that the block manager does not give to an admission."""

    def _pages_of(self, seq: Sequence, entry: Found) -> list[int]:
        """Return the pages of an admitted sequence that an entry is loaded to."""
        return [seq.block_table[entry.block_index]]

    def _keep_entries(self, uid: int, digest: bytes, page: int) -> None:
        """Offer the entries of a cached block to the store."""
        self.traffic.keep(self._key(digest, KV), [page])
