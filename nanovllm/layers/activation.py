"""The gated activation between an MLP's two linears."""

import torch
from torch import nn
from torch.nn.functional import silu


class SiluAndMul(nn.Module):
    """SwiGLU (arXiv 2002.05202): silu of the first half of the last dimension, times the second."""

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate) * up
