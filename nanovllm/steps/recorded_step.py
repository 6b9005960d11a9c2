"""The model's forward pass on the CPU, recorded once and replayed by a single call of C.

In a small step, the Python code between two kernels would take as long as a short kernel. Knows no
scheduling and no sampling.
"""

import dataclasses
import logging
from collections.abc import Callable, Sequence as Seq

import torch

from nanovllm.attention.batch import Batch
from nanovllm.attention.states import StateRows
from nanovllm.kernels.cpu import table_ops
from nanovllm.scheduler.messages import Row
from nanovllm.steps.recording import Recording, Unrecordable
from nanovllm.worker.device_tables import DeviceTables
from nanovllm.worker.extensions import Computed

logger = logging.getLogger(__name__)

Forward = Callable[[Batch], torch.Tensor]
"""Returns hidden states [T, hidden_size]."""

MAX_TOKENS = 64
"""Larger steps run call by call: there Python's share of the time is small, and a recording keeps
the memory of all intermediate tensors."""


class RecordedModel:
    """A forward pass for batches of up to MAX_TOKENS tokens.

    Args:
        model: a module or a function. All that it computes must be calls of C kernels.
        tables: hold the tokens and blocks of the batches, and the pages of states.

    Raises:
        Unrecordable: torch computes some of the forward pass.
    """

    def __init__(self, model: Forward, tables: DeviceTables) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype)

        self._tables = tables
        num_tables, width = 1 + len(tables.other_tables), tables.block_tables.shape[1]
        self._inputs = (
            zeros(MAX_TOKENS, dtype=torch.int64),
            zeros(MAX_TOKENS, dtype=torch.int64),
            zeros(num_tables, MAX_TOKENS, dtype=torch.int64),
            zeros(MAX_TOKENS + 1),
            zeros(MAX_TOKENS),
            zeros(num_tables, MAX_TOKENS, width),
        )
        input_ids, positions, slots, cu_seqlens_q, seq_lens, blocks = self._inputs
        batch, *others = (
            Batch(input_ids, positions, slots[i], cu_seqlens_q, seq_lens, blocks[i])
            for i in range(num_tables)
        )
        self._state: table_ops.StateColumns | None = None
        state = None
        if tables.state_table is not None:
            source = tables.state_table.pages
            pages, write_lens = zeros(MAX_TOKENS, source.shape[1]), zeros(MAX_TOKENS)
            self._state = table_ops.StateColumns(source, pages, write_lens)
            state = StateRows(pages, cu_seqlens_q, write_lens)
        batch = dataclasses.replace(batch, state=state, others=tuple(others))
        with Recording(MAX_TOKENS) as self._recording:
            self._hidden: torch.Tensor = model(batch)

    def fits(self, rows: Seq[Row]) -> bool:
        """Return whether the recording is large enough for `rows`.

        Beside layers with state, it has none of the work that drafts make.
        """
        states = self._tables.state_table
        if states is not None and states.replays.concern(rows):
            return False
        return sum(row.num_scheduled_tokens for row in rows) <= MAX_TOKENS

    def run(self, rows: Seq[Row]) -> Computed:
        """Write the KV of the tokens of `rows`; return their hidden states."""
        return Computed(self.forward(rows))

    def forward(self, rows: Seq[Row]) -> torch.Tensor:
        """Do the same; return [T, hidden_size], which the next call overwrites."""
        table_indices = [row.table_idx for row in rows]
        query_lens = [row.num_scheduled_tokens for row in rows]
        seq_lens = [row.num_computed_tokens + row.num_scheduled_tokens for row in rows]
        tables, num_tokens = self._tables, sum(query_lens)
        table_ops.batch(
            tables.token_ids,
            tables.block_tables,
            tables.block_size,
            table_indices,
            query_lens,
            seq_lens,
            self._inputs,
            self._state,
        )
        self._recording.run(num_tokens, len(rows))
        return self._hidden[:num_tokens]


def record(model: Forward, tables: DeviceTables) -> RecordedModel | None:
    """Return the recorded `model`; if it cannot be recorded, log the reason and return None."""
    try:
        return RecordedModel(model, tables)
    except Unrecordable as reason:
        logger.info("steps run call by call: %s", reason)
        return None
