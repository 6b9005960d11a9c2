"""`Batch`: one step's tokens, the input of a model and its attention backend."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from nanovllm.kernels.states import StateRows


class HostLengths(NamedTuple):
    """The lengths of a batch's rows on the host, for planning."""

    query_lens: tuple[int, ...]
    """Tokens of this step."""
    seq_lens: tuple[int, ...]
    """Tokens in the KV cache, those of this step included."""


class Replaced(NamedTuple):
    """Values of N tokens of a batch, in place of those that follow from their ids or positions."""

    indices: torch.Tensor
    """[N] int64, of the tokens in the batch."""
    values: torch.Tensor
    """[N, ...]."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """The T tokens of R rows, row after row, in the schedule's order.

    Everything is on the device, except `lengths`.
    """

    input_ids: torch.Tensor
    """[T] int64."""
    positions: torch.Tensor
    """[T] int64, the token's position in its sequence: where its KV lies, and what it sees."""
    slot_mapping: torch.Tensor
    """[T] int64, block id * block_size + offset: the slot that takes the token's KV."""
    cu_seqlens_q: torch.Tensor
    """[R + 1] int32, the cumulative query lengths: the index of each row's first token, then T."""
    seq_lens: torch.Tensor
    """[R] int32, the row's tokens in the KV cache, those of this step included."""
    block_tables: torch.Tensor
    """[R, width] int32, block ids. Columns past a row's last block may hold any number."""
    lengths: HostLengths | None = None
    """None: the host does not know them, because a CUDA graph, or a recording of a CPU's kernel
    calls, will see other rows. If such a batch is planned, each row has one token or none."""
    output_indices: torch.Tensor | None = None
    """[O] int64, the tokens whose hidden states the model returns; None: all T."""
    metadata: Any = None
    """What the backend's `plan` returned for this batch."""
    attend: (
        Callable[
            [Callable[..., torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
        ]
        | None
    ) = None
    """Called in place of the backend's `attend`: takes that, q, the layer's KV cache and a tensor
    for the result. None: the backend attends."""
    state: "StateRows | None" = None
    """For layers with state; None: the model has none."""
    others: tuple["Batch", ...] = ()
    """The same tokens for layers with another block table or plan than this one's."""
    rope_positions: torch.Tensor | None = None
    """[T] int64, the row of the table of angles that each token uses; None: its position."""
    embeds: tuple[Replaced, ...] = ()
    """[N, hidden_size] each: what the first layer reads of tokens that stand for other inputs."""

    @property
    def angle_rows(self) -> torch.Tensor:
        """[T] int64, the row of the table of angles that each token uses."""
        return self.positions if self.rope_positions is None else self.rope_positions
