"""Which pages of the pool hold the state of each table row's sequence, and which tokens of a step
change it: those that it computes, and accepted drafts of the last step, which it recomputes.
"""

import dataclasses
from array import array
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch

from nanovllm.core.messages import Row, Schedule
from nanovllm.core.worker_info import WorkerInfo
from nanovllm.kernels.states import Replay, StateRows
from nanovllm.platform import Platform


class ReplayedRows(NamedTuple):
    """The numbers of `Replay` and `StateRows` for a step with drafts, or after accepted ones."""

    own: "array[int]"
    sources: "array[int]"
    kept: "array[int]"
    cu_seqlens: "array[int]"
    write_lens: "array[int]"


class Replays:
    """Counts the drafts of each table row's last step that layers compute again.

    A draft may be rejected, so a step does not change a state with it. It keeps what enters the
    layer for each draft in the layer's log, and the row's next step computes the accepted ones
    again, before its own tokens.

    Args:
        num_drafts: most drafts of a row. Of more, in steps that only measure, the first are kept.
    """

    def __init__(self, num_table_rows: int, num_drafts: int, platform: Platform) -> None:
        self.num_drafts = num_drafts
        self.num_log_rows = num_table_rows * num_drafts
        self._platform = platform
        # By table row:
        self._first_drafts: dict[int, int] = {}  # of its last step, if that had any: the position
        self._accepted: dict[int, int] = {}  # how many of them its row of this step follows

    def begin(self, schedule: Schedule) -> None:
        """Note what a step computes again. Called before each step."""
        first_drafts = self._first_drafts
        for new in schedule.admissions:
            first_drafts.pop(new.table_idx, None)
        self._accepted.clear()
        for row in schedule.rows:
            first = first_drafts.pop(row.table_idx, None)
            if first is not None and row.num_computed_tokens > first:
                self._accepted[row.table_idx] = row.num_computed_tokens - first
            if row.num_draft_tokens:  # the same with fewer or no drafts
                first_drafts[row.table_idx] = row.sample_position

    def count(self, table_idx: int) -> int:
        """Return how many tokens the row of `table_idx` computes again in this step."""
        return self._accepted.get(table_idx, 0)

    def concern(self, rows: Seq[Row]) -> bool:
        """Return whether the step's `rows` have drafts, or follow accepted ones."""
        return any(row.num_draft_tokens or row.table_idx in self._accepted for row in rows)

    def lay_out(self, rows: Seq[Row]) -> ReplayedRows:
        """Return what a step of `rows` computes, which they `concern`."""
        found = ReplayedRows(*(array("q") for _ in ReplayedRows._fields))
        own, sources, kept, cu_seqlens, write_lens = found
        cu_seqlens.append(0)
        for row in rows:
            count = self.count(row.table_idx)
            first = cu_seqlens[-1] + count
            num_tokens = row.num_scheduled_tokens
            known = num_tokens - row.num_draft_tokens
            num_kept = min(row.num_draft_tokens, self.num_drafts)
            log_row = row.table_idx * self.num_drafts
            sources.extend(range(-1 - log_row, -1 - log_row - count, -1))
            sources.extend(range(len(own), len(own) + num_tokens))
            own.extend(range(first, first + num_tokens))
            kept.extend([-1] * (count + known))
            kept.extend(range(log_row, log_row + num_kept))
            kept.extend([-1] * (row.num_draft_tokens - num_kept))
            write_lens.append(count + known)
            cu_seqlens.append(first + num_tokens)
        return found

    def extend(self, state: StateRows, rows: Seq[Row]) -> StateRows:
        """Return `state`, of a step of `rows`, with the tokens that it computes again."""
        if not self.concern(rows):
            return state
        parts = self.lay_out(rows)
        numbers = array("q")
        for part in parts:
            numbers.extend(part)
        uploaded = torch.split(self._platform.upload(numbers), [len(part) for part in parts])
        replay = Replay(uploaded[0], uploaded[1], uploaded[2], self.num_log_rows)
        ends, lens = (x.int() for x in uploaded[3:])
        return dataclasses.replace(state, cu_seqlens=ends, write_lens=lens, replay=replay)


class StateTable:
    """The columns of the device tables after the block tables: `pages`, [table rows, state_pages]
    int32, which `NewBlocks` write. A table row that no sequence has owned yet names the last pages
    of the pool: only steps before the first request have such rows.
    """

    def __init__(self, pages: torch.Tensor, info: WorkerInfo, platform: Platform) -> None:
        self.pages = pages
        self.replays = Replays(len(pages), info.drafts.max_draft_tokens, platform)
        end = info.num_blocks
        last = torch.arange(end - info.kv.state_pages, end, device=pages.device)
        pages.copy_(last.clamp(min=0).int().expand_as(pages))

    def rows(
        self,
        rows: Seq[Row],
        table_indices: torch.Tensor,
        lens: torch.Tensor,
        cu_seqlens: torch.Tensor,
    ) -> StateRows:
        """Return where the states of `rows` are, and which tokens change them: all but drafts, and
        before them the last step's drafts that were accepted. [R] int64: the table row of each,
        and its tokens; [R + 1]: their ends.
        """
        pages = self.pages[table_indices]
        state = StateRows(pages, cu_seqlens.int(), lens.int())
        return self.replays.extend(state, rows)
