"""`Kernels`: what a device computes beside matrix products and attention, here in plain torch.

`kernels.selector` chooses the object once, and the layers and the worker call it. Knows no layer
and no batch.
"""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F


class WeightMethod(Protocol):
    """A weight [n, k] in a form of its own, with the operations that read it."""

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x [T, k] times the transpose of the weight, plus `bias` [n] if given: [T, n]."""
        ...

    def embedding(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows `ids` [T] int64 of the weight: [T, k]."""
        ...


class Kernels:
    """Plain torch: for every device and dtype, and the reference of the subclasses."""

    name: ClassVar[str] = "torch"
    sample: Callable[..., torch.Tensor] | None = None
    """Draws a token for each row of logits as `layers.sampler.draw` does, given its temperatures,
    seeds, positions, top_ks, top_ps and min_ps. It gives each row its own work, and sorts nothing.
    None: draw in torch."""
    fp8: ModuleType | None = None
    """Kernels that multiply in FP8: `kernels.triton.fp8`."""
    ngram: ModuleType | None = None
    """Kernels for prompt lookup on a GPU: `kernels.triton.ngram`."""

    def add_rms_norm(
        self, x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add `x`, if given, to `residual` in place, and return the RMSNorm of `residual`."""
        if x is not None:
            residual += x
        return rms_norm(residual, weight, eps)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return silu(first half) * second half of each row of gate_up [T, 2n]: [T, n].

        The first half of `gate_up` may be overwritten.
        """
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def pack(self, weight: torch.Tensor, *, is_embedding: bool) -> WeightMethod | None:
        """Return `weight` [n, k] with all its bits in a form that is faster to multiply, or None.

        Args:
            is_embedding: whether the weight is also used as an embedding.
        """
        return None

    def can_pack_rows(self, weight: torch.Tensor) -> bool:
        """Return whether `weight` can become a `kernels.cpu.packed.PackedWeight`, row by row."""
        return False

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the index [R] int64 of the first largest logit in each row of [R, vocab_size].

        It is -1 for a row whose logits are no distribution: some are NaN or +inf, or all are -inf.
        """
        tokens = logits.argmax(-1)  # of the first NaN, if there is one
        largest = logits.gather(-1, tokens[:, None])[:, 0]
        return torch.where(largest.isfinite(), tokens, -1)

    def to_float(self, x: torch.Tensor) -> torch.Tensor:
        """Return a copy of `x` in float32."""
        return x.to(torch.float32, copy=True)

    def forbid(self, logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
        """Set `logits` [R, n] float32, contiguous, to -inf in place where a mask has a 0.

        Args:
            rows: [m] int64, the row of each mask.
            masks: [m, at least n / 8] uint8 on the host: a bit for each token, the lowest first.
        """
        masks = masks.to(logits.device, non_blocking=True)
        bits = 1 << torch.arange(8, dtype=torch.uint8, device=masks.device)
        forbidden = ((masks[:, :, None] & bits).flatten(1) == 0)[:, : logits.shape[1]]
        logits[rows] = logits[rows].masked_fill(forbidden, -torch.inf)

    def store_rows(self, pool: torch.Tensor, x: torch.Tensor, rows: torch.Tensor) -> None:
        """Write row t of `x` [T, n] to row rows[t] of `pool` [slots, n]."""
        pool.index_copy_(0, rows, x)

    def take_rows(self, pool: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return rows `rows` [T] int64 of `pool` [slots, n]."""
        return pool[rows]

    def join_columns(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return `parts` [T, any] side by side in new, contiguous rows."""
        return torch.cat(list(parts), dim=1)

    def gather(
        self,
        token_ids: torch.Tensor,
        block_tables: torch.Tensor,
        block_size: int,
        table_indices: torch.Tensor,
        positions: torch.Tensor,
        columns: tuple[torch.Tensor, ...],
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Gather the inputs of a decode step from the device tables.

        Args:
            token_ids, block_tables: [table rows, n] int32; a row is contiguous.
            table_indices: [R] int64.
            positions: [R] int64, of the rows' input tokens.
            columns: any number of contiguous [table rows], of any dtype.

        Returns:
            First input_ids [R] int64, slot_mapping [R] int64, seq_lens [R] int32, block_tables
            [R, n] int32 and the next positions [R] int64. Second, the R table rows of each of
            `columns`.
        """
        tables, following = block_tables[table_indices], positions + 1
        blocks = tables.gather(1, (positions // block_size)[:, None])[:, 0].long()
        slot_mapping = blocks * block_size + positions % block_size
        input_ids = token_ids[table_indices, positions].long()
        inputs = input_ids, slot_mapping, following.int(), tables, following
        return inputs, tuple(column[table_indices] for column in columns)

    def advance(
        self,
        token_ids: torch.Tensor,
        table_indices: torch.Tensor,
        positions: torch.Tensor,
        moves: torch.Tensor,
        places: torch.Tensor,
        tokens: torch.Tensor,
        out: torch.Tensor,
        stride: int,
    ) -> None:
        """Write `tokens` at `positions` + 1 of the table rows, and to elements `places` of `out`.

        Then add `moves` to `positions`, and `stride` to `places`, modulo the length of `out`. The
        tables get 0 for a negative token, because the next step looks up its embedding. All
        tensors but `out` [n] and `token_ids`, int32, are [R] int64. No two rows write the same
        cell, except in the last table row. On a GPU, `out` may be pinned memory of the host.
        """
        out[places] = tokens
        token_ids[table_indices, positions + 1] = tokens.clamp(min=0).int()
        positions.add_(moves)
        places.add_(stride).remainder_(len(out))

    def accept(
        self,
        last_positions: torch.Tensor,
        table_indices: torch.Tensor,
        following: torch.Tensor,
        inputs: torch.Tensor,
        tokens: torch.Tensor,
    ) -> None:
        """Set `last_positions` [table rows] by the drafts that `tokens` confirm, as
        `StepOutput.result` counts.

        Two neighbours with one table index and consecutive positions belong to one row: the input
        of the second is a draft, which the token of the first confirms or not. A row whose first
        token is negative moves on as if it had one; it ends with an error. The last table row
        belongs to no sequence. All tensors are int64, the others [S].

        Args:
            following: positions of `tokens`.
            inputs: tokens at the positions before; not read for the first of a row.
        """
        first = torch.ones_like(table_indices, dtype=torch.bool)
        first[1:] = table_indices[1:] != table_indices[:-1]
        first[1:] |= following[1:] != following[:-1] + 1
        wrong = torch.zeros_like(first)
        wrong[1:] = ~first[1:] & (inputs[1:] != tokens[:-1])
        # A token counts if the last event up to it is the beginning of a row, not a wrong draft.
        index = torch.arange(len(tokens), device=tokens.device)
        events = torch.where(first | wrong, 2 * index + first, 0)
        counts = events.cummax(0).values % 2 == 1
        last = counts.clone()
        last[:-1] &= ~counts[1:] | first[1:]
        places = torch.where(last, table_indices, len(last_positions) - 1)
        failed = (tokens < 0) & ~first
        last_positions[places] = following - failed.long()


TORCH = Kernels()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMSNorm (arXiv 1910.07467) of the last dimension, rounded as in transformers.

    The mean square is computed in float32, whatever the dtype.
    """
    x_float = x.float()
    scale = torch.rsqrt(x_float.square().mean(-1, keepdim=True) + eps)
    return (x_float * scale).to(x.dtype) * weight


def rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate each pair (i, i + head_dim / 2) of the heads x [T, heads, head_dim] by its angle.

    Args:
        cos_sin: [T, head_dim] float32: cosines, then sines, of each token.
    """
    cos, sin = cos_sin[:, None].chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.to(x.dtype)
