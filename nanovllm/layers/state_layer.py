"""`StateLayer`: the base of layers that keep a state for each sequence."""

from collections.abc import Sequence

import torch
from torch import nn

from nanovllm.kernels.states import StatePart, StateRows, States
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

    def bind(self, states: States) -> None:
        """Use `states`, this layer's parts in the pool."""
        self.states = states

    def extended(self, parts: Sequence[torch.Tensor], rows: StateRows) -> Sequence[torch.Tensor]:
        """Return [E, n] for each of `parts` [T, n]: the inputs of the step's own tokens, and those
        of drafts that are computed again. Keep those of the step's drafts.

        Call it once in a forward pass, with all that the state depends on. Without drafts, it
        returns `parts` itself.

        Args:
            parts: rows may lie apart. The first is contiguous in the result if it is here.
        """
        if (replay := rows.replay) is None:
            return parts
        if self._log is None:
            first = parts[0]
            sizes = replay.num_log_rows + 1, sum(part.shape[1] for part in parts)
            self._log = torch.empty(sizes, dtype=first.dtype, device=first.device)
        return self.kernels.extend(parts, self._log, rows, replay)

    def own(self, outputs: torch.Tensor, rows: StateRows) -> torch.Tensor:
        """Return the rows of `outputs` [E, ...] that are of the step's own tokens: [T, ...]."""
        replay = rows.replay
        if replay is None or len(replay.own) == len(replay.sources):
            return outputs
        return self.kernels.take_rows(outputs.flatten(1), replay.own).view(-1, *outputs.shape[1:])
