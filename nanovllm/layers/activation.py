"""The gated activation between the two linears of an MLP."""

from types import ModuleType

import torch
from torch import nn
from torch.nn.functional import silu


class SiluAndMul(nn.Module):
    """SwiGLU (arXiv 2002.05202): silu of the first half of the last dimension, times the second.

    The kernels may write the result over the first half of the input.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels: ModuleType | None = None  # None: plain torch

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        if self.kernels is not None:
            return self.kernels.silu_and_mul(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate) * up
