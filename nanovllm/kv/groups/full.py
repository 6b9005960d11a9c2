"""Layers that attend to all tokens: a page for each block, in table 0."""

from collections.abc import Sequence as Seq

from nanovllm.core.sequence import KVState, Sequence
from nanovllm.kv.groups.group import KVCacheGroup, StepPages
from nanovllm.kv.trie import Hit, Node


class FullGroup(KVCacheGroup):
    """Holds `KVState.block_table`: a page for each block of a sequence, from its first on.

    Each model has this group. A node of the trie is its entry: the block is cached as long as the
    node's page is not reused. Other groups cache theirs at its nodes.

    Invariants, verified by nanovllm/testing/invariants.py:
    - A page's `ref_count` is the number of block tables that hold it. Only a cached one has more
      than 1.
    - A cached block is full, its key leads to its node, and the node to its page.
    """

    suffix = b""
    num_tables = 1

    def needed(self, num_blocks: int) -> range:
        return range(num_blocks)

    def has(self, node: Node) -> bool:
        return True

    def num_missing(self, seq: Sequence, num_tokens: int, hit: Hit | None = None) -> int:
        num_blocks = -(-num_tokens // self.block_size) - len(seq.kv.block_table)
        if hit is None:
            return max(0, num_blocks)
        blocks = self.pool.blocks
        nodes = hit.nodes
        num_revived = sum(blocks[node.page].ref_count == 0 for node in nodes)
        return max(0, num_blocks - len(nodes)) + num_revived

    def begin(self, seq: Sequence, hit: Hit, num_missing: int) -> int:
        pages = [node.page for node in hit.nodes]
        if not pages:
            return 0
        num_free = self.pool.num_free
        self.pool.hold(pages)
        kv = seq.kv
        kv.block_table += pages
        kv.num_published_blocks = len(pages)
        kv.parent_uid = hit.nodes[-1].uid
        return num_free - self.pool.num_free

    def extend(self, seq: Sequence, num_tokens: int) -> None:
        table = seq.kv.block_table
        num_new = -(-num_tokens // self.block_size) - len(table)
        table += [self.pool.take() for _ in range(num_new)]

    def publish_blocks(self, seq: Sequence, num_full: int) -> list[Node]:
        """Cache a sequence's first `num_full` blocks, which are full and written.

        If a block with the same contents is cached already, it stays cached, and the sequence's
        next blocks are cached as children of that one.

        Returns:
            The nodes of those that were not published before.
        """
        keys = self.trie.keys(seq, num_full)
        kv = seq.kv
        found: list[Node] = []
        while kv.parent_uid is not None and kv.num_published_blocks < num_full:
            key_hash, tokens = keys[kv.num_published_blocks]
            key = (kv.parent_uid, key_hash)
            node = self.trie.nodes.get(key)
            if node is None:
                page = kv.block_table[kv.num_published_blocks]
                node = self.trie.add(key, tokens, page)
                self.pool.blocks[page].entry = node
            elif node.tokens != tokens:  # a hash collision: later blocks have no cached parent
                kv.parent_uid = None
                break
            found.append(node)
            kv.parent_uid = node.uid
            kv.num_published_blocks += 1
        return found

    def trim(self, seq: Sequence, num_blocks: int) -> None:
        """Free the pages after the first `num_blocks`. None of them is cached."""
        table = seq.kv.block_table
        self.pool.release(reversed(table[num_blocks:]))
        del table[num_blocks:]

    def free(self, seq: Sequence, distrusted: Seq[Node] | None) -> None:
        """Free a sequence's pages. Its tail is evicted before its prefix."""
        for page in reversed(seq.kv.block_table):
            block = self.pool.blocks[page]
            if distrusted is not None and block.ref_count == 1 and isinstance(block.entry, Node):
                self.trie.remove(block.entry, evicted=False)
            self.pool.release([page])
        seq.kv = KVState(seq.root_uid, block_keys=seq.kv.block_keys)

    def forget(self, node: Node, *, evicted: bool) -> None:
        if evicted:
            self.pool.listener.evicted(node, self.suffix, [node.page])
        self.pool.clear(node.page)

    def pages_of(self, seq: Sequence, index: int) -> list[int]:
        return [seq.kv.block_table[index]]

    def kept_pages(self, node: Node) -> Seq[int]:
        return [node.page]

    def fill_step(self, step: StepPages) -> None:
        """Add the blocks that rows begin and may not fill."""
        size = self.block_size
        for row in step.rows:
            if -row.num_computed_tokens % size < row.num_scheduled_tokens:  # it begins a block
                begun = row.begun_blocks(size)
                table = step.sequences[row.seq_id].kv.block_table
                step.blocks_to_zero += table[begun.start : begun.stop]
