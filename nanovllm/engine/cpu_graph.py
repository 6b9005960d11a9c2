"""The model's forward pass on the CPU, recorded once and replayed by a single call of C.

In a small step Python would take as long between the kernels as some of them take. Knows no
scheduling and no sampling.
"""

import logging

import torch
from torch import nn

from nanovllm.attention.backend import Batch
from nanovllm.kernels import cpu

logger = logging.getLogger(__name__)

MAX_TOKENS = 64
"""Larger steps run call by call: Python's share is small, and every tensor in between is kept."""


class RecordedModel:
    """`model`'s forward pass for batches of up to MAX_TOKENS tokens.

    Args:
        model: all of whose work is done by the C kernels.
        width: columns of the block table.

    Raises:
        Unrecordable: torch has a part in it.
    """

    def __init__(self, model: nn.Module, width: int) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype)

        self._batch = Batch(
            input_ids=zeros(MAX_TOKENS, dtype=torch.int64),
            positions=zeros(MAX_TOKENS, dtype=torch.int64),
            slot_mapping=zeros(MAX_TOKENS, dtype=torch.int64),
            cu_seqlens_q=zeros(MAX_TOKENS + 1),
            seq_lens=zeros(MAX_TOKENS),
            block_tables=zeros(MAX_TOKENS, width),
            query_lens_host=(),
            seq_lens_host=(),
        )
        with cpu.Recording(MAX_TOKENS) as self._recording:
            self._hidden: torch.Tensor = model(self._batch)

    def fits(self, batch: Batch) -> bool:
        """Whether the recording serves `batch`."""
        return len(batch.input_ids) <= MAX_TOKENS

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Return hidden states [T, hidden_size], overwritten by the next call."""
        num_tokens, num_rows, ours = len(batch.input_ids), len(batch.seq_lens), self._batch
        ours.input_ids[:num_tokens] = batch.input_ids
        ours.positions[:num_tokens] = batch.positions
        ours.slot_mapping[:num_tokens] = batch.slot_mapping
        ours.cu_seqlens_q[: num_rows + 1] = batch.cu_seqlens_q
        ours.seq_lens[:num_rows] = batch.seq_lens
        ours.block_tables[:num_rows, : batch.block_tables.shape[1]] = batch.block_tables
        self._recording.run(num_tokens, num_rows)
        return self._hidden[:num_tokens]


def record(model: nn.Module, width: int) -> RecordedModel | None:
    """Return `model` recorded, or None (and a line in the log) where it cannot be."""
    try:
        return RecordedModel(model, width)
    except cpu.Unrecordable as reason:
        logger.info("steps run call by call: %s", reason)
        return None
