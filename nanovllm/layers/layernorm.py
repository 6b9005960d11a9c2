"""RMSNorm, alone or fused with the addition of the residual."""

from types import ModuleType

import torch
from torch import nn

from nanovllm.kernels.torch_kernels import rms_norm


class RMSNorm(nn.Module):
    """Root mean square normalisation."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.kernels: ModuleType | None = None  # None: plain torch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension of `x`."""
        return rms_norm(x, self.weight, self.eps)

    def add_norm(
        self, x: torch.Tensor | None, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add `x` to `residual` (None: add nothing); return (normalised sum, sum).

        The kernels overwrite `residual` with the sum.
        """
        if self.kernels is not None:
            return self.kernels.add_rms_norm(x, residual, self.weight, self.eps), residual
        if x is not None:
            residual = residual + x
        return self(residual), residual
