"""RMSNorm, alone or fused with the addition of the residual."""

import torch
from torch import nn

from nanovllm.kernels.torch_kernels import TORCH, Kernels
from nanovllm.kernels.torch_math import rms_norm


class RMSNorm(nn.Module):
    """Root mean square normalisation."""

    kernels: Kernels = TORCH
    """The loader sets those of the device. TORCH, in kernels/torch_kernels.py, is plain torch."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension of `x`."""
        return rms_norm(x, self.weight, self.eps)

    def add_norm(
        self, x: torch.Tensor | None, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add `x` to `residual` in place (None: add nothing); return (normalised sum, sum)."""
        return self.kernels.add_rms_norm(x, residual, self.weight, self.eps), residual
