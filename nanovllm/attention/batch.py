"""`Batch`: one step's tokens, the input of a model and its attention backend."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from nanovllm.kernels.states import StateRows


class HostLengths(NamedTuple):
    """The lengths of a batch's rows on the host, for planning."""

    query_lens: tuple[int, ...]  # tokens of this step
    seq_lens: tuple[int, ...]  # tokens in the KV cache, those of this step included


class Replaced(NamedTuple):
    """Values of N tokens of a batch, in place of those that follow from their ids or positions."""

    indices: torch.Tensor  # [N] int64, of the tokens in the batch
    values: torch.Tensor  # [N, ...]


@dataclasses.dataclass(frozen=True)
class Batch:
    """The T tokens of R rows, row after row, in the schedule's order.

    Everything is on the device, except `lengths`.
    """

    input_ids: torch.Tensor  # [T] int64
    # [T] int64, the token's position in its sequence: where its KV lies, and what it sees.
    positions: torch.Tensor
    # [T] int64, block id * block_size + offset: the slot that takes the token's KV.
    slot_mapping: torch.Tensor
    # [R + 1] int32, the cumulative query lengths: the index of each row's first token, then T.
    cu_seqlens_q: torch.Tensor
    # [R] int32, the row's tokens in the KV cache, those of this step included.
    seq_lens: torch.Tensor
    # [R, width] int32, block ids. Columns past a row's last block may hold any number.
    block_tables: torch.Tensor
    # None: the host does not know them, because a CUDA graph, or a recording of a CPU's kernel
    # calls, will see other rows. If such a batch is planned, each row has one token or none.
    lengths: HostLengths | None = None
    # [O] int64, the tokens whose hidden states the model returns; None: all T.
    output_indices: torch.Tensor | None = None
    metadata: Any = None  # what the backend's `plan` returned for this batch
    # Called in place of the backend's `attend`: takes that, q, the layer's KV cache and a tensor
    # for the result. None: the backend attends.
    attend: Callable[..., torch.Tensor] | None = None
    state: "StateRows | None" = None  # for layers with state; None: the model has none
    # The same tokens for layers with another block table or plan than this one's.
    others: tuple["Batch", ...] = ()
    # [T] int64, the row of the table of angles that each token uses; None: its position.
    rope_positions: torch.Tensor | None = None
    # [T] int32: a token sees the keys of its row before this one, if the spec `sees_pictures`, but
    # none before its window. None: those up to its own.
    ends: torch.Tensor | None = None
    # [N, (1 + D) * hidden_size] each: what the first layer reads of tokens that stand for other
    # inputs, and what is added to the outputs of the first D layers.
    embeds: tuple[Replaced, ...] = ()

    def outputs(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows [O, ...] of `x` [T, ...] that `output_indices` names."""
        return x if self.output_indices is None else x[self.output_indices]

    @property
    def before_last(self) -> "Batch":
        """The batch for all layers but the last: the next one's attention needs all tokens."""
        is_whole = self.output_indices is None
        return self if is_whole else dataclasses.replace(self, output_indices=None)

    @property
    def angle_rows(self) -> torch.Tensor:
        """[T] int64, the row of the table of angles that each token uses."""
        return self.positions if self.rope_positions is None else self.rope_positions
