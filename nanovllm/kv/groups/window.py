"""Layers that attend to a window of tokens: only the blocks of the window are held."""

import dataclasses
from collections import deque
from collections.abc import Sequence as Seq
from itertools import islice

from nanovllm.core.messages import NewBlocks
from nanovllm.core.sequence import Sequence
from nanovllm.core.worker_info import WindowSpec
from nanovllm.kv.groups.group import KVCacheGroup, StepPages
from nanovllm.kv.trie import Hit, Node


@dataclasses.dataclass(slots=True, eq=False)
class WindowBlock:
    """The pages of one block. It is cached if and only if it has a `node`."""

    group: "WindowGroup"
    pages: list[int]
    node: Node | None = None

    def evict(self) -> None:
        """Leave the prefix cache, because one of the pages is reused."""
        self.group.drop(self, evicted=True)


@dataclasses.dataclass(slots=True)
class WindowTable:
    """The blocks that a sequence holds: one after the other, up to its last."""

    start: int  # index in the sequence of the first block held
    blocks: deque[WindowBlock]
    num_sent: int  # the workers have the blocks before this index
    unfilled: list[WindowBlock]  # those that a load fills, as long as they have no pages

    @property
    def end(self) -> int:
        return self.start + len(self.blocks)


class WindowGroup(KVCacheGroup):
    """Holds, for each running sequence, the blocks that its next tokens read.

    Invariants, verified by nanovllm/testing/invariants.py:
    - A window table holds the blocks of all positions that the next token reads, or a later one.
      Without steps in flight it holds no earlier block.
    - The `ref_count` of a window block's pages is the number of window tables that hold it.
    - A cached window block is full, and its node is in the trie.

    A block that leaves the window is full and written. It is cached, then freed. So a later
    sequence with the same prefix finds it, until the pages are reused.

    Steps run in the order of their launches. So a page may be freed while launched steps read it:
    its next owner writes it later. Where pages are short, blocks that only launched steps read are
    freed at once, before their KV is written. These are not cached.

    Args:
        number: of the group, among those with a window.
        max_num_batched_tokens: the most tokens of a step. The group holds no more blocks than the
            next step may write.
    """

    def __init__(self, window: WindowSpec, number: int, max_num_batched_tokens: int) -> None:
        self.window = window
        self.suffix = b"w%d" % number
        self.num_tables = window.pages
        self._max_num_batched_tokens = max_num_batched_tokens
        self._tables: dict[Sequence, WindowTable] = {}
        self._cached: dict[int, WindowBlock] = {}  # by uid of the node

    def needed(self, num_blocks: int) -> range:
        """Return the blocks that the token after a prefix reads, or a later one."""
        position = num_blocks * self.block_size
        return range(self.window.first_block(position, self.block_size), num_blocks)

    def has(self, node: Node) -> bool:
        return node.uid in self._cached

    def num_missing(self, seq: Sequence, num_tokens: int, hit: Hit | None = None) -> int:
        if hit is None:
            num_blocks = max(0, self._end(seq, num_tokens) - self._tables[seq].end)
            return num_blocks * self.num_tables
        num_new = max(0, self._end(seq, num_tokens) - hit.num_blocks)
        for index in self.needed(hit.num_blocks):
            if (index, self.suffix) in hit.loaded:
                num_new += 1
            else:
                pages = self._cached[hit.matched[index].uid].pages
                num_new += self.pool.blocks[pages[0]].ref_count == 0
        return num_new * self.num_tables

    def begin(self, seq: Sequence, hit: Hit, num_missing: int) -> int:
        num_free = self.pool.num_free
        blocks: deque[WindowBlock] = deque()
        unfilled: list[WindowBlock] = []
        needed = self.needed(hit.num_blocks)
        for index in needed:
            if (index, self.suffix) in hit.loaded:
                unfilled.append(WindowBlock(self, []))
                blocks.append(unfilled[-1])
            else:
                blocks.append(self._cached[hit.matched[index].uid])
                self.pool.hold(blocks[-1].pages)
        self._tables[seq] = WindowTable(needed.start, blocks, needed.start, unfilled)
        return num_free - self.pool.num_free

    def extend(self, seq: Sequence, num_tokens: int) -> None:
        """Take pages for no more tokens than the next step may compute."""
        table = self._tables[seq]
        for _ in range(self._end(seq, num_tokens) - table.end):
            table.blocks.append(WindowBlock(self, self.take_pages()))
        for block in table.unfilled:
            block.pages = self.take_pages()
        table.unfilled.clear()

    def make_room(self, seq: Sequence, num_pages: int) -> None:
        """Free the blocks that only launched steps of the sequence read."""
        if seq in self._tables:
            # A row that gets drafts has its token counted as computed, but not launched.
            self._leave(self._tables[seq], seq.num_computed_tokens - seq.num_draft_tokens - 1)

    def publish(self, seq: Sequence, first: int, nodes: Seq[Node], num_written: int) -> None:
        table = self._tables[seq]
        for index, node in enumerate(nodes, first):
            if index >= table.start:
                self._cache(table.blocks[index - table.start], node)
        self._leave(table, num_written)

    def publish_loaded(self, seq: Sequence, index: int, node: Node) -> None:
        table = self._tables[seq]
        self._cache(table.blocks[index - table.start], node)

    def trim(self, seq: Sequence, num_blocks: int) -> None:
        table = self._tables[seq]
        while table.end > num_blocks:
            self.pool.release(table.blocks.pop().pages)
        table.num_sent = min(table.num_sent, num_blocks)

    def free(self, seq: Sequence, distrusted: Seq[Node] | None) -> None:
        table = self._tables.pop(seq, None)
        while table is not None and table.blocks:
            self.pool.release(table.blocks.pop().pages)
        for node in distrusted or ():
            block = self._cached.get(node.uid)
            if block is not None and self.pool.blocks[block.pages[0]].ref_count == 0:
                self.drop(block, evicted=False)

    def forget(self, node: Node, *, evicted: bool) -> None:
        block = self._cached.get(node.uid)
        if block is not None:
            self.drop(block, evicted=evicted)

    def drop(self, block: WindowBlock, *, evicted: bool) -> None:
        """Remove a window block from the prefix cache. Its free pages are reused first."""
        assert block.node is not None
        if evicted:
            self.pool.listener.evicted(block.node, self.suffix, block.pages)
        del self._cached[block.node.uid]
        block.node = None
        for page in block.pages:
            self.pool.clear(page)

    def pages_of(self, seq: Sequence, index: int) -> list[int]:
        table = self._tables[seq]
        return table.blocks[index - table.start].pages

    def kept_pages(self, node: Node) -> Seq[int]:
        block = self._cached.get(node.uid)
        return () if block is None else block.pages

    def fill_step(self, step: StepPages) -> None:
        """Add the blocks that the workers' tables lack, and those that rows may not fill."""
        width = step.width
        start = self.first_table * width
        for row in step.rows:
            table = self._tables[step.sequences[row.seq_id]]
            if table.num_sent < table.end:
                index = max(table.num_sent, table.start)
                blocks = list(islice(table.blocks, index - table.start, None))
                for number in range(self.num_tables):
                    pages = [block.pages[number] for block in blocks]
                    where = start + number * width + index
                    step.new_blocks.append(NewBlocks(row.table_idx, where, pages))
                table.num_sent = table.end
            for index in row.begun_blocks(self.block_size):
                step.blocks_to_zero += table.blocks[index - table.start].pages

    def _end(self, seq: Sequence, num_tokens: int) -> int:
        """Return the block index up to which pages are held for the first `num_tokens` tokens."""
        most = seq.num_computed_tokens + self._max_num_batched_tokens
        return -(-min(num_tokens, most) // self.block_size)

    def _leave(self, table: WindowTable, position: int) -> None:
        """Free the blocks that a token at `position`, or after it, does not read."""
        first = self.window.first_block(position, self.block_size)
        while table.start < first and table.blocks:
            self.pool.release(table.blocks.popleft().pages)
            table.start += 1

    def _cache(self, block: WindowBlock, node: Node) -> None:
        """Cache a window block, unless one with the same contents is cached already."""
        if self._cached.setdefault(node.uid, block) is block:
            block.node = node
            for page in block.pages:
                self.pool.blocks[page].entry = block
