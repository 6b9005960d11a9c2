"""RMSNorm, alone or after adding the residual. Reduces in float32 whatever the dtype."""

from types import ModuleType

import torch
from torch import nn


class RMSNorm(nn.Module):
    """Root mean square normalisation (arXiv 1910.07467), as transformers rounds it."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.kernels: ModuleType | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension of `x`."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight

    def add_norm(
        self, x: torch.Tensor | None, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (normalised sum, sum) of `x`, if any, and `residual`, which may be overwritten."""
        if self.kernels is not None:
            return self.kernels.add_rms_norm(x, residual, self.weight, self.eps), residual
        if x is not None:
            residual = residual + x
        return self(residual), residual
