"""Which drafts of the last step layers with state compute again: those that were accepted.

A draft may be rejected, so a step does not change a state with it. It keeps what enters the layer
for each draft in the layer's log, and the row's next step computes the accepted ones again, before
its own tokens. Knows no layer.
"""

import dataclasses
from array import array
from collections.abc import Sequence as Seq

import torch

from nanovllm.attention.states import Replay, StateRows
from nanovllm.scheduler.messages import Row, Schedule
from nanovllm.utils.transfer import upload


class Replays:
    """Counts the accepted drafts of each table row.

    Args:
        num_drafts: most drafts of a row. Of more, in steps that only measure, the first are kept.
    """

    def __init__(self, num_table_rows: int, num_drafts: int, device: torch.device) -> None:
        self._num_drafts = num_drafts
        self._num_log_rows = num_table_rows * num_drafts
        self._device = device
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
        """Return whether the step's `rows` have drafts, or follow accepted ones.

        If so, a way to run steps that knows no log must not run it.
        """
        return any(row.num_draft_tokens or row.table_idx in self._accepted for row in rows)

    def extend(self, state: StateRows, rows: Seq[Row]) -> StateRows:
        """Return `state`, of a step of `rows`, with the tokens that it computes again."""
        if not self.concern(rows):
            return state
        own, logged, log_rows, draft_tokens, draft_rows = (array("q") for _ in range(5))
        cu_seqlens, write_lens, num_own = array("q", [0]), array("q"), 0
        for row in rows:
            start, count = cu_seqlens[-1], self.count(row.table_idx)
            end, first_log_row = start + count, row.table_idx * self._num_drafts
            logged.extend(range(start, end))
            log_rows.extend(range(first_log_row, first_log_row + count))
            own.extend(range(end, end + row.num_scheduled_tokens))
            known = row.num_scheduled_tokens - row.num_draft_tokens
            num_kept = min(row.num_draft_tokens, self._num_drafts)
            draft_tokens.extend(range(num_own + known, num_own + known + num_kept))
            draft_rows.extend(range(first_log_row, first_log_row + num_kept))
            num_own += row.num_scheduled_tokens
            write_lens.append(count + known)
            cu_seqlens.append(end + row.num_scheduled_tokens)
        parts = (own, logged, log_rows, draft_tokens, draft_rows, cu_seqlens, write_lens)
        numbers = array("q")
        for part in parts:
            numbers.extend(part)
        uploaded = torch.split(upload(numbers, self._device), [len(part) for part in parts])
        ends, lens = uploaded[5].int(), uploaded[6].int()
        replay = Replay._make((*uploaded[:5], self._num_log_rows))
        return dataclasses.replace(state, cu_seqlens=ends, write_lens=lens, replay=replay)
