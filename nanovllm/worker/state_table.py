"""Which pages of the pool hold the state of each table row's sequence, and which tokens of a step
change it. Knows no layer.
"""

from collections.abc import Sequence as Seq

import torch

from nanovllm.attention.states import StateRows
from nanovllm.scheduler.messages import Row
from nanovllm.scheduler.worker_info import WorkerInfo
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
        end = info.num_blocks
        last = torch.arange(end - info.state_pages, end, device=pages.device)
        pages.copy_(last.clamp(min=0).int().expand_as(pages))

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
        state = StateRows(self.pages[table_indices], cu_seqlens.int(), lens.int())
        return self.replays.extend(state, rows)
