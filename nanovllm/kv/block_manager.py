"""Which sequences own which pages of the KV pool, and what the prefix cache finds again.

The pool has the pages, the trie the keys of the prefix cache, and each group what layers of one
kind keep. `BlockManager` asks them all.
"""

from collections.abc import Callable, Sequence as Seq
from functools import partial

from nanovllm.core.messages import PageCopy
from nanovllm.core.sequence import Sequence
from nanovllm.kv.eviction import EvictionOrder
from nanovllm.kv.groups.full import FullGroup
from nanovllm.kv.groups.group import KVCacheGroup, StepPages
from nanovllm.kv.pool import BlockPool
from nanovllm.kv.trie import Hit, Node, PrefixTrie


class BlockManager:
    """Allocates pages to sequences and caches full blocks for other sequences.

    Besides the group of full attention a model may have any further ones. A prefix hits as far as
    every group can serve it. An allocation is all or nothing, over all groups.

    A block may be cached only once its KV is written: `publish` relies on its caller for this.
    Every operation costs O(blocks that it touches), whatever the size of the pool.

    Args:
        num_blocks: number of pages, of all groups together.
        groups: further ones. Their block tables lie after table 0, in this order.
        order: of the free pages, for `num_blocks` pages; None: least recently used first.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        groups: Seq[KVCacheGroup] = (),
        order: EvictionOrder | None = None,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks, order=order)
        self.blocks = self.pool.blocks
        self.trie = PrefixTrie(block_size, is_enabled=enable_prefix_caching)
        self.full = FullGroup()
        self.groups: tuple[KVCacheGroup, ...] = (self.full, *groups)
        self.group_of = {group.suffix: group for group in self.groups}
        self._others = self.groups[1:]
        self._growing = tuple(group for group in self._others if group.grows)
        first_table = 0
        for group in self.groups:
            group.attach(self.pool, self.trie, first_table)
            first_table += group.num_tables

    @property
    def num_free_blocks(self) -> int:
        """Pages that sequences can have: the free ones, and those that groups would give up."""
        num_free = self.pool.num_free
        for group in self._others:
            num_free += group.num_spare
        return num_free

    @property
    def max_extra_tokens(self) -> int:
        """How many tokens more than it was given `row_length` may return."""
        return max(group.max_extra_tokens for group in self.groups)

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def match_prefix(self, seq: Sequence) -> Hit:
        """Return the longest prefix up to `Sequence.longest_hit` that all groups have cached."""
        matched = self.trie.match(seq)
        num_blocks = min(len(matched), seq.longest_hit // self.block_size)
        if self._others:
            num_blocks = self.longest_hit(num_blocks, lambda group, i: group.has(matched[i]))
        return Hit(matched, num_blocks)

    def longest_hit(self, num_blocks: int, has: Callable[[KVCacheGroup, int], bool]) -> int:
        """Return the longest prefix that all groups can serve: of `num_blocks`, if that of full
        attention `has` what the other groups need at block indices.
        """
        last = -1
        while num_blocks != last:
            last = num_blocks
            for group in self._others:
                num_blocks = group.longest_hit(num_blocks, partial(has, group))
        return num_blocks

    def allocate_blocks(
        self, seq: Sequence, num_tokens: int, hit: Hit | None = None
    ) -> list[int] | None:
        """Extend what a sequence holds to its first `num_tokens` tokens; return the ids of the
        blocks appended to `KVState.block_table`, or None, with nothing taken, if too few are free.

        Args:
            hit: of an admission, as `match_prefix` returned it. The sequence then begins after it.
        """
        if hit is not None:
            return self._admit(seq, num_tokens, hit)
        if num_tokens <= len(seq.kv.block_table) * self.block_size and not self._growing:
            return []
        if not seq.kv.block_table:
            return self._admit(seq, num_tokens, Hit([]))
        num_missing = self.full.num_missing(seq, num_tokens)
        for group in self._growing:
            num_missing += group.num_missing(seq, num_tokens)
        if not num_missing:
            return []
        if num_missing > self.pool.num_free and not self._make_room(seq, num_missing):
            return None
        num_owned = len(seq.kv.block_table)
        self.full.extend(seq, num_tokens)
        for group in self._growing:
            group.extend(seq, num_tokens)
        return seq.kv.block_table[num_owned:]

    def publish(self, seq: Sequence, num_written: int) -> None:
        """Cache the full blocks of a sequence's first `num_written` tokens, whose KV is written,
        and free what no later token reads.
        """
        first = seq.kv.num_published_blocks
        num_full = min(num_written, len(seq.token_ids)) // self.block_size
        nodes: Seq[Node] = ()
        if num_full > first and self.enable_prefix_caching:
            nodes = self.full.publish_blocks(seq, num_full)
        for group in self._others:
            group.publish(seq, first, nodes, num_written)
        if nodes:
            self.pool.listener.published(seq, first, nodes)

    def publish_loaded(
        self, seq: Sequence, num_blocks: int, places: Seq[tuple[int, bytes]]
    ) -> None:
        """Cache what a load has filled of a sequence's first `num_blocks` blocks, at `places`:
        (block index, `KVCacheGroup.suffix`). Entries at blocks that the pool had are cached, too.
        """
        nodes = list(self.trie.chain(seq))
        for index, suffix in places:
            if index < len(nodes):
                self.group_of[suffix].publish_loaded(seq, index, nodes[index])
        self.publish(seq, num_blocks * self.block_size)

    def trim(self, seq: Sequence, num_tokens: int) -> None:
        """Free the blocks after a sequence's first `num_tokens` tokens. None of them is cached."""
        num_blocks = self.blocks_for(num_tokens)
        if num_blocks < len(seq.kv.block_table):
            self.full.trim(seq, num_blocks)
        for group in self._growing:
            group.trim(seq, num_blocks)

    def free(self, seq: Sequence, *, keep_cached: bool = True) -> None:
        """Free all that a sequence holds. What is cached stays cached until its pages are reused;
        without `keep_cached` its KV may be wrong: what no other sequence holds of it leaves.
        """
        nodes = None if keep_cached else list(self.trie.chain(seq))
        for group in self.groups:
            group.free(seq, nodes)
        if nodes:
            gone = [node for node in nodes if self.trie.nodes.get(node.key) is not node]
            self.pool.listener.distrusted(gone)

    def reset_prefix_cache(self) -> bool:
        """Forget all that is cached; return False, and forget none, while a sequence owns pages."""
        if self.pool.num_free < len(self.blocks):
            return False
        for node in list(self.trie.nodes.values()):
            self.trie.remove(node, evicted=False)
        self.pool.listener.cleared()
        return True

    def begin_step(self) -> None:
        """Do what groups do between two steps. The scheduler calls it before it takes pages."""
        for group in self._others:
            group.begin_step()

    def row_length(self, seq: Sequence, most: int) -> int:
        """Return how many of a prompt's next `most` tokens a row computes: up to where a group ends
        rows, or up to `max_extra_tokens` more than `most`.
        """
        for group in self._others:
            most = group.row_length(seq, most)
        return most

    def fill_step(self, step: StepPages) -> None:
        """Add all that the message of a step says of pages. See `KVCacheGroup.fill_step`."""
        for group in self.groups:
            group.fill_step(step)

    def end_copies(self, copies: Seq[PageCopy]) -> None:
        """Learn that a step with these copies has succeeded."""
        for group in self._others:
            group.end_copies(copies)

    def undo_copies(self, copies: Seq[PageCopy]) -> None:
        """Learn that a step with these copies has failed, and may not have made them."""
        for group in self._others:
            group.undo_copies(copies)

    def _admit(self, seq: Sequence, num_tokens: int, hit: Hit) -> list[int] | None:
        """Give a sequence without pages all that it needs to begin after a hit."""
        assert not seq.kv.block_table
        seq.num_computed_tokens = hit.num_blocks * self.block_size
        num_missing = sum(group.num_missing(seq, num_tokens, hit) for group in self.groups)
        if num_missing > self.num_free_blocks:
            seq.num_computed_tokens = 0
            return None
        for group in self.groups:
            num_missing -= group.begin(seq, hit, num_missing)
        if num_missing > self.pool.num_free:
            self._make_room(seq, num_missing)
        for group in self.groups:
            group.extend(seq, num_tokens)
        if hit.num_blocks:
            self.pool.listener.published(seq, 0, hit.nodes)
        return list(seq.kv.block_table)

    def _make_room(self, seq: Sequence, num_pages: int) -> bool:
        """Let groups give up pages for a sequence; return whether `num_pages` are free then."""
        for group in self._others:
            group.make_room(seq, num_pages)
        return num_pages <= self.pool.num_free
