"""A short convolution between two gates: the layer of LFM2 that keeps a state."""

import torch

from nanovllm.attention.batch import Batch
from nanovllm.kernels.states import StatePart
from nanovllm.layers.linear import RowParallelLinear, divide
from nanovllm.layers.pieces import ChannelConv, PiecedLinear, TensorRows
from nanovllm.layers.state_layer import StateLayer
from nanovllm.utils.distributed import tensor_parallel


class ShortConv(StateLayer):
    """Mixes the last few tokens: out_proj(C * conv(B * x)), where in_proj computes B, C and x.

    Each rank has some channels.

    Args:
        taps: tokens that the convolution takes.
        bias: whether the convolution and the linears have one.
    """

    def __init__(self, hidden_size: int, taps: int, *, bias: bool) -> None:
        self.size = size = divide(hidden_size, "hidden_size")
        super().__init__((StatePart((taps - 1, size), torch.get_default_dtype()),))
        start = tensor_parallel().rank * size
        total = 3 * hidden_size
        parts = [TensorRows("in_proj", total, i * hidden_size + start, size) for i in range(3)]
        self.in_proj = PiecedLinear(hidden_size, parts, bias=bias)
        self.conv = ChannelConv([TensorRows("conv", hidden_size, start, size)], taps, bias=bias)
        self.out_proj = RowParallelLinear(hidden_size, hidden_size, bias=bias)

    def forward(
        self, hidden: torch.Tensor, batch: Batch, output_indices: torch.Tensor | None
    ) -> torch.Tensor:
        """Change the rows' states; return [O, hidden_size] for `hidden` [T, hidden_size]."""
        assert batch.state is not None
        rows = batch.state
        kernels = self.kernels
        before, after, x = self.in_proj(hidden).split_with_sizes([self.size] * 3, dim=1)
        (inputs,) = self.extended([kernels.mul_act(before, x, "identity")], rows)
        weight = self.conv.taps
        bias = self.conv.bias
        mixed = kernels.causal_conv(inputs, weight, bias, False, self.states, rows)
        mixed = self.own(mixed, rows)
        if output_indices is not None:
            mixed = mixed[output_indices]
            after = after[output_indices]
        return self.out_proj(kernels.mul_act(after, mixed, "identity"))
