"""`Batch`: one step's tokens, as a model and its attention backend see them."""

import dataclasses
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Batch:
    """One step's tokens, those of a row side by side, rows in the schedule's order.

    R rows, T tokens. Everything is on the device but the two tuples, which are the host's copies
    for planning.
    """

    input_ids: torch.Tensor
    """[T] int64."""
    positions: torch.Tensor
    """[T] int64, position in its sequence."""
    slot_mapping: torch.Tensor
    """[T] int64, block id * block_size + offset: where the token's KV goes."""
    cu_seqlens_q: torch.Tensor
    """[R + 1] int32, where each row's tokens begin."""
    seq_lens: torch.Tensor
    """[R] int32, tokens in the KV cache once this step has stored its own."""
    block_tables: torch.Tensor
    """[R, width] int32, block ids; columns past a row's last block hold anything."""
    query_lens_host: tuple[int, ...]
    seq_lens_host: tuple[int, ...]
    output_indices: torch.Tensor | None = None
    """Tokens whose hidden states are wanted, in their order; None: all."""
    metadata: Any = None
    """What the backend planned for this batch."""
