"""`StateLayer`, the base of layers with a state for each sequence, and the simplest of them."""

from collections.abc import Sequence

import torch
from torch import nn

from nanovllm.attention.batch import Batch
from nanovllm.kernels.states import StatePart, StateRows, States
from nanovllm.kernels.torch_kernels import TORCH, Kernels
from nanovllm.layers.linear import RowParallelLinear, divide
from nanovllm.layers.pieces import ChannelConv, PiecedLinear, own_rows


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


class ShortConv(StateLayer):
    """LFM2's short convolution between two gates: out_proj(C * conv(B * x)).

    in_proj computes B, C and x. Each rank has some channels.

    Args:
        taps: tokens that the convolution takes.
        bias: whether the convolution and the linears have one.
    """

    def __init__(self, hidden_size: int, taps: int, *, bias: bool) -> None:
        self.size = size = divide(hidden_size, "hidden_size")
        super().__init__((StatePart((taps - 1, size), torch.get_default_dtype()),))
        thirds = (i * hidden_size for i in range(3))
        parts = [own_rows("in_proj", 3 * hidden_size, start, hidden_size) for start in thirds]
        self.in_proj = PiecedLinear(hidden_size, parts, bias=bias)
        self.conv = ChannelConv([own_rows("conv", hidden_size)], taps, bias=bias)
        self.out_proj = RowParallelLinear(hidden_size, hidden_size, bias=bias)

    def forward(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Change the rows' states; return [O, hidden_size] for `hidden` [T, hidden_size]."""
        assert batch.state is not None
        rows = batch.state
        kernels = self.kernels
        before, after, x = self.in_proj(hidden).split_with_sizes([self.size] * 3, dim=1)
        (inputs,) = self.extended([kernels.mul_act(before, x, "identity")], rows)
        weight = self.conv.taps
        bias = self.conv.bias
        mixed = kernels.causal_conv(inputs, weight, bias, False, self.states, rows)
        mixed = batch.outputs(self.own(mixed, rows))
        return self.out_proj(kernels.mul_act(batch.outputs(after), mixed, "identity"))
