"""The gated activation between the two linears of an MLP."""

import torch
from torch import nn

from nanovllm.kernels.torch_kernels import TORCH, Kernels


class SiluAndMul(nn.Module):
    """SwiGLU (arXiv 2002.05202): silu of the first half of the last dimension, times the second.

    The result may be written over the first half of the input.
    """

    kernels: Kernels = TORCH
    """The loader sets those of the device. TORCH, in kernels/torch_kernels.py, is plain torch."""

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self.kernels.silu_and_mul(gate_up)
