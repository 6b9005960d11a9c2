"""The block manager and the scheduler of a model with window groups, see scheduler/windows.py.

Group 0 is managed as in a model without windows. This module adds what window groups hold. Knows no
tensors.
"""

import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence as Seq
from itertools import islice

from nanovllm.scheduler.block_manager import Block, BlockManager
from nanovllm.scheduler.cached_chain import cached_chain
from nanovllm.scheduler.messages import NewBlocks, Row, Schedule
from nanovllm.scheduler.scheduler import Scheduler
from nanovllm.scheduler.sequence import Sequence
from nanovllm.scheduler.windows import WindowGroup

Key = tuple[int, int]
"""Of a cached window block: (index of its group, uid of group 0's block at the same place)."""


@dataclasses.dataclass(slots=True, eq=False)
class WindowBlock:
    """The pages of one block of a window group.

    It is cached if and only if it has a `key`. With `ref_count` 0 all of its pages are free; if it
    is also cached, a prefix hit can revive it.
    """

    pages: list[int]
    ref_count: int = 1
    key: Key | None = None


@dataclasses.dataclass(slots=True)
class WindowTable:
    """The blocks of a window group that a sequence holds: one after the other, up to its last."""

    start: int  # index in the sequence of the first block held
    blocks: deque[WindowBlock]
    num_sent: int  # the workers have the blocks before this index

    @property
    def end(self) -> int:
        return self.start + len(self.blocks)


class WindowedBlockManager(BlockManager):
    """Holds, for each window group, the blocks that the next tokens of a sequence read.

    Invariants, beside those of `BlockManager`, verified by tests/scheduler/invariants.py:
    - A window table holds the blocks of all positions that the next token reads, or a later one.
      Without steps in flight it holds no earlier block.
    - A window block's `ref_count` is the number of window tables that hold it. Its pages have a
      `ref_count` of 1 if it has any, else they are free.
    - A cached window block is full, and the block that its key names is cached, too.

    A block that leaves the window is full and written. It is cached, then freed. So a later
    sequence with the same prefix finds it, until the pages are reused. A prefix of m blocks hits if
    group 0 has all of them cached, and each window group those that the next token reads.

    Steps run in the order of their launches. So a page may be freed while launched steps read it:
    its next owner writes it later. Where pages are short, blocks that only launched steps read are
    freed at once, before their KV is written. These are not cached.

    Args:
        num_blocks: number of pages, of all groups together.
        max_num_batched_tokens: the most tokens of a step. Window groups hold no more blocks than
            the next step may write.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        windows: Seq[WindowGroup],
        max_num_batched_tokens: int,
        enable_prefix_caching: bool = True,
    ) -> None:
        super().__init__(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching)
        self.windows = tuple(windows)
        self._max_num_batched_tokens = max_num_batched_tokens
        self._tables: dict[Sequence, list[WindowTable]] = {}  # a table for each group
        self._cached_windows: dict[Key, WindowBlock] = {}
        self._cached_pages: dict[int, WindowBlock] = {}  # by page

    def match_prefix(self, seq: Sequence) -> list[int]:
        """Return group 0's blocks of the longest prefix whose window blocks are cached, too."""
        matched = super().match_prefix(seq)
        while (index := self._last_missing(matched)) is not None:
            del matched[index:]
        return matched

    def allocate_blocks(
        self, seq: Sequence, num_tokens: int, cached_blocks: Seq[int] = ()
    ) -> list[int] | None:
        """Extend a sequence's block table and its window tables, all or nothing.

        Window tables get blocks for no more tokens than the next step may compute.

        Returns:
            The blocks appended to table 0; None, with nothing taken, if too few pages are free.
        """
        computed = max(seq.num_computed_tokens, self.hit_position(cached_blocks))
        end = self.blocks_for(min(num_tokens, computed + self._max_num_batched_tokens))
        tables = self._tables.get(seq)
        if tables is None:
            tables = [self._begun(index, cached_blocks) for index in range(len(self.windows))]
        elif self.blocks_for(num_tokens) <= len(seq.block_table) and all(
            t.end >= end for t in tables
        ):
            return []
        num_missing = self._num_pages_missing(seq, num_tokens, cached_blocks)
        num_missing += self._num_window_pages_missing(seq, tables, end)
        if num_missing > len(self._free):
            # A row that gets drafts has its token counted as computed, but not launched.
            self._leave(seq, seq.num_computed_tokens - seq.num_draft_tokens - 1)
            if num_missing > len(self._free):
                return None
        if seq not in self._tables:
            self._revive(tables)
            self._tables[seq] = tables
        appended = super().allocate_blocks(seq, num_tokens, cached_blocks)
        assert appended is not None
        for table, group in zip(tables, self.windows, strict=True):
            for _ in range(end - table.end):
                pages = [self._take_free_block() for _ in range(group.pages)]
                table.blocks.append(WindowBlock(pages))
        return appended

    def publish(self, seq: Sequence, num_written: int) -> None:
        """Cache the full blocks of a sequence's first `num_written` tokens; free those that no
        later token reads.
        """
        index, parent_uid = seq.num_published_blocks, seq.parent_uid
        super().publish(seq, num_written)
        for uid, _ in cached_chain(self, seq, index, parent_uid):
            for number, table in enumerate(self._tables[seq]):
                if index >= table.start:
                    self._cache(table.blocks[index - table.start], (number, uid))
            index += 1
        self._leave(seq, num_written)

    def trim(self, seq: Sequence, num_tokens: int) -> None:
        super().trim(seq, num_tokens)
        end = self.blocks_for(num_tokens)
        for table in self._tables[seq]:
            while table.end > end:
                self._let_go(table.blocks.pop())
            table.num_sent = min(table.num_sent, end)

    def free(self, seq: Sequence, *, keep_cached: bool = True) -> None:
        chain = [] if keep_cached else list(cached_chain(self, seq, 0, seq.root_uid))
        super().free(seq, keep_cached=keep_cached)
        for table in self._tables.pop(seq, ()):
            while table.blocks:
                self._let_go(table.blocks.pop())
        for key in [(number, uid) for number in range(len(self.windows)) for uid, _ in chain]:
            block = self._cached_windows.get(key)
            if block is not None and block.ref_count == 0:
                self._forget(block)

    def take_unsent(self, seq: Sequence, table_idx: int, width: int) -> list[NewBlocks]:
        """Return the window blocks that the workers' table row lacks, and count them as sent.

        Args:
            width: of each block table in the table row.
        """
        found = []
        start = width
        for table, group in zip(self._tables[seq], self.windows, strict=True):
            if table.num_sent < table.end:
                index = max(table.num_sent, table.start)
                blocks = list(islice(table.blocks, index - table.start, None))
                for i in range(group.pages):
                    pages = [block.pages[i] for block in blocks]
                    found.append(NewBlocks(table_idx, start + i * width + index, pages))
                table.num_sent = table.end
            start += group.pages * width
        return found

    def begun_pages(self, seq: Sequence, row: Row) -> list[int]:
        """Return the pages of window blocks that `row` begins and may not fill."""
        first = max(
            self.blocks_for(row.num_computed_tokens), row.sample_position // self.block_size
        )
        return [
            page
            for index in range(first, self.blocks_for(row.end))
            for table in self._tables[seq]
            for page in table.blocks[index - table.start].pages
        ]

    def _last_missing(self, matched: list[int]) -> int | None:
        """Return the index of the last block of a prefix that a window needs and does not find."""
        for number, index in self._needed(len(matched)):
            if (number, self.blocks[matched[index]].uid) not in self._cached_windows:
                return index
        return None

    def _needed(self, num_blocks: int) -> Iterator[tuple[int, int]]:
        """Yield (group, index) of the window blocks that the token behind a prefix reads.

        Later blocks come first.
        """
        position = num_blocks * self.block_size
        firsts = [group.first_block(position, self.block_size) for group in self.windows]
        for index in reversed(range(min(firsts, default=num_blocks), num_blocks)):
            for number, first in enumerate(firsts):
                if index >= first:
                    yield number, index

    def _begun(self, number: int, cached_blocks: Seq[int]) -> WindowTable:
        """Return a window table of cached blocks, for the tokens behind those of a prefix hit."""
        position = self.hit_position(cached_blocks)
        start = self.windows[number].first_block(position, self.block_size)
        indices = range(start, position // self.block_size)
        blocks = deque(self._begun_block(number, index, cached_blocks) for index in indices)
        return WindowTable(start, blocks, num_sent=start)

    def _begun_block(self, number: int, index: int, cached_blocks: Seq[int]) -> WindowBlock:
        """Return the cached window block at the place of `cached_blocks[index]`."""
        uid = self.blocks[cached_blocks[index]].uid
        assert uid is not None
        return self._cached_windows[number, uid]

    def _num_pages_missing(self, seq: Sequence, num_tokens: int, cached_blocks: Seq[int]) -> int:
        """Return how many free pages of group 0 `allocate_blocks` takes, revived ones included."""
        num_held = len(seq.block_table) + len(cached_blocks)
        num_revived = sum(self.blocks[block_id].ref_count == 0 for block_id in cached_blocks)
        return max(0, self.blocks_for(num_tokens) - num_held) + num_revived

    def _num_window_pages_missing(self, seq: Sequence, tables: list[WindowTable], end: int) -> int:
        """Return the same of the window groups, whose tables shall end at index `end`."""
        num_pages = 0
        for table, group in zip(tables, self.windows, strict=True):
            num_blocks = max(0, end - table.end)
            if seq not in self._tables:
                num_blocks += sum(block.ref_count == 0 for block in table.blocks)
            num_pages += group.pages * num_blocks
        return num_pages

    def _revive(self, tables: list[WindowTable]) -> None:
        """Hold the cached blocks of new tables."""
        for block in (block for table in tables for block in table.blocks):
            if block.ref_count == 0:
                for page in block.pages:
                    del self._free[page]
                    self.blocks[page].ref_count = 1
            block.ref_count += 1

    def _leave(self, seq: Sequence, position: int) -> None:
        """Free the window blocks that a token at `position`, or behind it, does not read."""
        for table, group in zip(self._tables.get(seq, ()), self.windows, strict=False):
            first = group.first_block(position, self.block_size)
            while table.start < first and table.blocks:
                self._let_go(table.blocks.popleft())
                table.start += 1

    def _let_go(self, block: WindowBlock) -> None:
        """Count one table less that holds `block`."""
        block.ref_count -= 1
        if block.ref_count == 0:
            for page in block.pages:
                self.blocks[page].ref_count = 0
                self._free[page] = None
                if block.key is None:
                    self._free.move_to_end(page, last=False)

    def _cache(self, block: WindowBlock, key: Key) -> None:
        """Cache a window block, unless one with the same contents is cached already."""
        if self._cached_windows.setdefault(key, block) is block:
            block.key = key
            self._cached_pages.update(dict.fromkeys(block.pages, block))

    def _forget(self, block: WindowBlock) -> None:
        """Remove a cached window block from the prefix cache. Its free pages are reused first."""
        assert block.key is not None
        del self._cached_windows[block.key]
        block.key = None
        for page in block.pages:
            del self._cached_pages[page]
            if page in self._free:
                self._free.move_to_end(page, last=False)

    def _take_free_block(self) -> int:
        page = super()._take_free_block()
        evicted = self._cached_pages.get(page)
        if evicted is not None:
            self._forget(evicted)
        return page

    def _uncache(self, block: Block) -> None:
        if block.uid is not None:
            for number in range(len(self.windows)):
                below = self._cached_windows.get((number, block.uid))
                if below is not None:
                    self._forget(below)
        super()._uncache(block)


class WindowedScheduler(Scheduler):
    """A scheduler whose steps carry the blocks of window groups, too."""

    block_manager: WindowedBlockManager

    def schedule(self) -> Schedule | None:
        schedule = super().schedule()
        if schedule is None:
            return None
        manager, width = self.block_manager, self.block_manager.blocks_for(self.max_model_len)
        new_blocks, to_zero = list(schedule.new_blocks), list(schedule.blocks_to_zero)
        for row in schedule.rows:
            seq = self._sequences[row.seq_id]
            new_blocks += manager.take_unsent(seq, row.table_idx, width)
            to_zero += manager.begun_pages(seq, row)
        return dataclasses.replace(schedule, new_blocks=new_blocks, blocks_to_zero=to_zero)
