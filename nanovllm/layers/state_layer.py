"""`StateLayer`: the base of layers that keep a state for each sequence."""

from collections.abc import Sequence

import torch
from torch import nn

from nanovllm.attention.states import StatePart, StateRows, States
from nanovllm.kernels.torch_kernels import TORCH, Kernels


class StateLayer(nn.Module):
    """A layer with a state. Call `bind` once before the first forward pass.

    Its forward pass reads each row's state from `self.states`, at the pages in `Batch.state`, and
    writes it there. A new sequence's state is zero.

    Args:
        parts: of the state, for this rank. The ranks have equally many, of equal sizes.
    """

    states: States
    kernels: Kernels = TORCH

    def __init__(self, parts: tuple[StatePart, ...]) -> None:
        super().__init__()
        self.parts = parts
        self._log: torch.Tensor | None = None  # made when there are drafts

    @property
    def computes_cells(self) -> bool:
        """Whether the layer computes prompts in cells: see `attention.states.Cells`."""
        return False

    def bind(self, states: States) -> None:
        """Use `states`, this layer's parts in the pool."""
        self.states = states

    def extended(self, inputs: torch.Tensor, rows: StateRows) -> torch.Tensor:
        """Return [E, n]: the `inputs` [T, n] of the step's own tokens, and those of drafts that are
        computed again. Keep those of the step's drafts.

        Call it once in a forward pass, with all that the state depends on. Without drafts, it
        returns `inputs` itself.

        Args:
            inputs: its rows may lie apart.
        """
        if (replay := rows.replay) is None:
            return inputs
        kernels = self.kernels
        if self._log is None:
            self._log = inputs.new_empty(replay.num_log_rows, inputs.shape[1])
        found = inputs
        if len(replay.logged):
            found = inputs.new_empty(len(inputs) + len(replay.logged), inputs.shape[1])
            kernels.store_rows(found, inputs, replay.own)
            kernels.store_rows(found, kernels.take_rows(self._log, replay.log_rows), replay.logged)
        if len(replay.draft_rows):
            drafts = kernels.take_rows(inputs, replay.draft_tokens)
            kernels.store_rows(self._log, drafts, replay.draft_rows)
        return found

    def all_extended(
        self, parts: Sequence[torch.Tensor], rows: StateRows
    ) -> Sequence[torch.Tensor]:
        """Return `parts` [T, any], which together are what `extended` takes, extended. The first
        is contiguous if it was before.
        """
        if rows.replay is None:
            return parts
        found = self.extended(self.kernels.join_columns(parts), rows)
        first, *others = found.split_with_sizes([part.shape[1] for part in parts], dim=1)
        return first.contiguous(), *others

    def own(self, outputs: torch.Tensor, rows: StateRows) -> torch.Tensor:
        """Return the rows of `outputs` [E, ...] that are of the step's own tokens: [T, ...]."""
        if (replay := rows.replay) is None or not len(replay.logged):
            return outputs
        return self.kernels.take_rows(outputs.flatten(1), replay.own).view(-1, *outputs.shape[1:])
