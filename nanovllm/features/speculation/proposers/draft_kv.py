"""Which slots of a draft network's KV pool are valid, so that it computes only what is missing.

The pool has the target's block ids. A draft network reads a row only when it is asked for drafts;
then it first catches up. Blocks may be shared, so validity is tracked for each block.
"""

from collections.abc import Iterator, Sequence as Seq

from nanovllm.core.messages import Row, Schedule

FEW_TOKENS = 16
"""A row that lacks no more than this many positions catches up in the step that drafts."""


class DraftKV:
    """Counts the valid slots of each block, from the block's start on.

    Args:
        width: of a table row's first block table, the only one that a draft network reads.
    """

    def __init__(self, num_table_rows: int, num_blocks: int, block_size: int, width: int) -> None:
        self._width = width
        self._block_size = block_size
        self._num_right = [0] * num_blocks
        # By table row: block table, positions known to be right, end of the drafts' KV. A table row
        # without a sequence holds block 0, as in the device tables.
        self._block_tables: list[list[int]] = [[0] for _ in range(num_table_rows)]
        self._ends = [0] * num_table_rows
        self._drafted: dict[int, int] = {}

    def admit(self, schedule: Schedule) -> None:
        """Forget the KV of blocks with a new owner; keep that of accepted drafts.

        A block that is loaded from a tier has the target's KV alone. A sequence that waits for its
        load has no row: its blocks from the first that is loaded on are new.
        """
        loaded = loaded_pages(schedule)
        for block in loaded:
            self._num_right[block] = 0
        if schedule.admissions:
            num_cached = {row.table_idx: row.num_computed_tokens for row in schedule.rows}
        for new in schedule.admissions:
            self._block_tables[new.table_idx] = list(new.block_ids)
            self._ends[new.table_idx] = 0
            self._drafted.pop(new.table_idx, None)
            first = num_cached.get(new.table_idx, 0) // self._block_size
            if new.table_idx not in num_cached:
                ids = enumerate(new.block_ids)
                first = next((index for index, block in ids if block in loaded), 0)
            for block in new.block_ids[first:]:
                self._num_right[block] = 0
        for blocks in schedule.new_blocks:
            if blocks.start >= self._width:
                continue
            self._block_tables[blocks.table_idx][blocks.start :] = blocks.block_ids
            for block in blocks.block_ids:
                self._num_right[block] = 0
        for row in schedule.rows:
            # The target computed the known tokens and the accepted drafts, and nothing else.
            end = self._drafted.pop(row.table_idx, 0)
            if end:
                self.set_right(row.table_idx, min(end, row.num_computed_tokens))

    def start(self, row: Row) -> int:
        """Return the first position to compute: known, and at the latest the last known one."""
        table_idx = row.table_idx
        size = self._block_size
        end = self._ends[table_idx]
        last = row.sample_position - 1
        blocks = self._block_tables[table_idx]
        for index in range(end // size, last // size + 1):
            num_right = self._num_right[blocks[index]]
            end = max(end, index * size + num_right)
            if num_right < size:
                break
        self._ends[table_idx] = end
        return min(end, last)

    def set_right(self, table_idx: int, end: int) -> None:
        """Note that the KV of all positions of a table row before `end` is right."""
        start = self._ends[table_idx]
        size = self._block_size
        for index in range(start // size, -(-end // size)):
            block = self._block_tables[table_idx][index]
            self._num_right[block] = max(self._num_right[block], min(end - index * size, size))
        self._ends[table_idx] = max(start, end)

    def set_drafted(self, table_idx: int, end: int) -> None:
        """Note that the KV before `end` is right as far as the drafts are accepted."""
        self._drafted[table_idx] = end

    def begun_blocks(self, row: Row, end: int) -> list[int]:
        """Return the empty blocks before `end` that the row's known tokens do not fill: they must
        be zeroed, as in `Schedule.blocks_to_zero`.
        """
        size = self._block_size
        blocks = self._block_tables[row.table_idx][: -(-end // size)]
        return [b for b in blocks[row.sample_position // size :] if not self._num_right[b]]

    def chunks(self, rows: Seq[Row], num_allowed: int, budget: int) -> Iterator[list[Row]]:
        """Yield batches of at most `budget` tokens, after which no row lacks more than
        `num_allowed` positions.

        The caller computes each batch before it takes the next one. A block that several rows share
        is computed once.
        """
        while True:
            chunk: list[Row] = []
            claimed: set[int] = set()
            left = budget
            for row in rows:
                start = self.start(row)
                last = row.sample_position - 1
                blocks = self._block_tables[row.table_idx]
                size = self._block_size
                if last - start < num_allowed or not left or blocks[start // size] in claimed:
                    continue
                count = min(last - start, left)
                chunk.append(Row(row.seq_id, row.table_idx, start, count, samples=False))
                claimed.update(blocks[start // size : -(-(start + count) // size)])
                left -= count
            if not chunk:
                return
            yield chunk
            for row in chunk:
                self.set_right(row.table_idx, row.end)


def loaded_pages(schedule: Schedule) -> set[int]:
    """Return the pages that the loads of a step fill."""
    if schedule.transfers is None:
        return set()
    parts = (part for load in schedule.transfers.loads for part in load.parts)
    return {page for part in parts for page in part.pages}
