"""Hidden states for a draft head: one layer's place in a pool of them, reading and joining rows.

The C kernels copy where they can, so that a recorded step has no call of torch. Knows no model.
"""

from collections.abc import Sequence

import torch

from nanovllm.kernels.cpu import ops as cpu_ops
from nanovllm.kernels.cpu.library import supports


class FeatureStore:
    """One layer's columns of a feature pool.

    Args:
        columns: [slots, hidden_size], a view of the pool.
        native: whether nanovllm's own kernels may be used.
    """

    def __init__(self, columns: torch.Tensor, *, native: bool) -> None:
        self._columns = columns
        self._native = native and supports(columns.device, columns.dtype)

    def store(self, hidden: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Write row t of `hidden` [T, hidden_size] to slot slot_mapping[t]."""
        if self._native:
            cpu_ops.copy_rows(hidden, self._columns, y_rows=slot_mapping)
        else:
            self._columns.index_copy_(0, slot_mapping, hidden)


def take_rows(pool: torch.Tensor, rows: torch.Tensor, *, native: bool) -> torch.Tensor:
    """Return rows `rows` [T] int64 of `pool` [slots, n].

    Args:
        native: whether nanovllm's own kernels may be used.
    """
    if not (native and supports(pool.device, pool.dtype)):
        return pool[rows]
    taken = torch.empty(len(rows), pool.shape[1], dtype=pool.dtype)
    cpu_ops.copy_rows(pool, taken, x_rows=rows)
    return taken


def join_columns(parts: Sequence[torch.Tensor], *, native: bool) -> torch.Tensor:
    """Return `parts` [T, any] side by side in new, contiguous rows.

    Args:
        native: whether nanovllm's own kernels may be used.
    """
    first = parts[0]
    if not (native and supports(first.device, first.dtype)):
        return torch.cat(list(parts), dim=1)
    joined = torch.empty(len(first), sum(part.shape[1] for part in parts), dtype=first.dtype)
    column = 0
    for part in parts:
        cpu_ops.copy_rows(part, joined[:, column : column + part.shape[1]])
        column += part.shape[1]
    return joined
