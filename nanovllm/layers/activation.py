"""The activation between the two linears of an MLP, gated or not."""

import torch
from torch import nn

from nanovllm.kernels.torch_kernels import TORCH, Kernels


class ActAndMul(nn.Module):
    """A gated linear unit (arXiv 2002.05202): an activation of the first half of the last
    dimension, times the second.

    The result may be written over the first half of the input.

    Args:
        activation: see `Kernels.act_and_mul`.
    """

    # The loader sets those of the device. TORCH, in kernels/torch_kernels.py, is plain torch.
    kernels: Kernels = TORCH

    def __init__(self, activation: str = "silu") -> None:
        super().__init__()
        self.activation = activation

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self.kernels.act_and_mul(gate_up, self.activation)


class Act(nn.Module):
    """An activation of each number. The result may be written over the input.

    Args:
        activation: see `Kernels.act`.
    """

    kernels: Kernels = TORCH

    def __init__(self, activation: str) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernels.act(x, self.activation)
