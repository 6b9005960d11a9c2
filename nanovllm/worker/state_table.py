"""Which pages of the pool hold the state of each table row's sequence, and which tokens of a step
change it. Knows no layer.
"""

from array import array
from collections.abc import Sequence as Seq

import torch

from nanovllm.attention.states import Cells, StateRows
from nanovllm.scheduler.messages import Row, Schedule
from nanovllm.scheduler.worker_info import WorkerInfo
from nanovllm.utils.transfer import upload
from nanovllm.worker.replays import Replays


class StateTable:
    """The columns of the device tables behind the block tables.

    A table row that no sequence has owned yet names the last pages of the pool: only steps before
    the first request have such rows.

    Args:
        pages: [table rows, state_pages] int32, a view of the tables, which `NewBlocks` write.
    """

    def __init__(self, pages: torch.Tensor, info: WorkerInfo) -> None:
        self.pages = pages
        self.replays = Replays(len(pages), info.max_draft_tokens, pages.device)
        self._cell_tokens = info.cell_tokens
        # By table row. Steps that only measure have no admissions: they compute prompts.
        self._num_prompt_tokens = [info.max_model_len] * len(pages)
        end = info.num_blocks
        last = torch.arange(end - info.state_pages, end, device=pages.device)
        pages.copy_(last.clamp(min=0).int().expand_as(pages))

    def begin(self, schedule: Schedule) -> None:
        """Note what a step computes. Called before each step."""
        for new in schedule.admissions:
            self._num_prompt_tokens[new.table_idx] = new.num_prompt_tokens
        self.replays.begin(schedule)

    def rows(
        self,
        rows: Seq[Row],
        table_indices: torch.Tensor,
        lens: torch.Tensor,
        cu_seqlens: torch.Tensor,
    ) -> StateRows:
        """Return where the states of `rows` are, and which tokens change them: all but drafts, and
        before them the last step's drafts that were accepted.

        Args:
            table_indices, lens: [R] int64, the table row of each, and its tokens.
            cu_seqlens: [R + 1] int64.
        """
        pages, cells = self.pages[table_indices], self._cells(rows)
        state = StateRows(pages, cu_seqlens.int(), lens.int(), cells=cells)
        return self.replays.extend(state, rows)

    def _cells(self, rows: Seq[Row]) -> Cells | None:
        """Return the cells of a step: all tokens of prompts, in rows that begin where a cell does.

        The others are rows of steps that only measure, and of hits that another engine stored.
        """
        size = self._cell_tokens
        if size == 1:
            return None
        spans, ends, begins, start = array("q"), array("q", [0]), array("q"), 0
        for row in rows:
            first, end = row.num_computed_tokens, row.sample_position
            end = min(end, self._num_prompt_tokens[row.table_idx])
            count = max(end - first, 0) if first % size == 0 else 0
            for offset in range(0, count, size):
                spans.extend((start + offset, min(size, count - offset)))
            ends.append(len(spans) // 2)
            begins.append(start + count)
            start += self.replays.count(row.table_idx) + row.num_scheduled_tokens
        if not spans:
            return None
        sizes = [len(spans), len(ends), len(begins)]
        uploaded = torch.split(upload(spans + ends + begins, self.pages.device).int(), sizes)
        return Cells(uploaded[0].view(-1, 2), uploaded[1], uploaded[2], sum(spans[1::2]))
