"""Hidden states for a draft head: storing them from the target's layers, reading and joining rows.

The C kernels copy where they can, so that a recorded step has no call of torch.
"""

from collections.abc import Sequence

import torch

from nanovllm.kernels.cpu import ops as cpu_ops
from nanovllm.kernels.cpu.library import supports
from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer


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


def capture_features(
    model: DecoderForCausalLM, layer_ids: Sequence[int], pool: torch.Tensor
) -> None:
    """Store what enters the layers `layer_ids` in `pool`, from the next forward pass on.

    Args:
        layer_ids: from 0 on, each one once.
        pool: [slots, len(layer_ids) * hidden_size], a row for each slot of the KV cache. The
            layers' hidden states lie side by side in the order of `layer_ids`.
    """
    parts = pool.chunk(len(layer_ids), dim=1)
    for layer_id, part in zip(layer_ids, parts, strict=True):
        layer = model.model.layers[layer_id]
        assert isinstance(layer, DecoderLayer)
        native = layer.input_layernorm.kernels is not None
        layer.store_input = FeatureStore(part, native=native).store


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
