"""RMSNorm and LayerNorm, alone or fused with the addition of the residual."""

import torch
from torch import nn

from nanovllm.kernels.torch_kernels import TORCH, Kernels
from nanovllm.kernels.torch_math import NORM_ROUNDED


class RMSNorm(nn.Module):
    """Root mean square normalisation.

    Args:
        kind: how the weight is applied: one of `NORM_*` in kernels/torch_math.py.
        multiplier: factor on what `add_norm` adds to the residual.
    """

    # The loader sets those of the device. TORCH, in kernels/torch_kernels.py, is plain torch.
    kernels: Kernels = TORCH

    def __init__(
        self, hidden_size: int, eps: float, kind: int = NORM_ROUNDED, multiplier: float = 1.0
    ) -> None:
        super().__init__()
        self.eps = eps
        self.kind = kind
        self.multiplier = multiplier
        self.weight = nn.Parameter(torch.empty(hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension of `x`, which is contiguous."""
        return self.kernels.add_rms_norm(None, x, self.weight, self.eps, self.kind)

    def add_norm(
        self, x: torch.Tensor | None, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add `x` to `residual` in place (None: add nothing); return (normalised sum, sum)."""
        add_rms_norm = self.kernels.add_rms_norm
        weight = self.weight
        return add_rms_norm(x, residual, weight, self.eps, self.kind, self.multiplier), residual


class LayerNorm(nn.Module):
    """Layer normalisation: the differences from the mean, divided by their root mean square.

    Mean and mean square are computed in float32, and the result is rounded once.

    Args:
        bias: whether a learned number is added to each.
    """

    kernels: Kernels = TORCH

    def __init__(self, hidden_size: int, eps: float, bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.bias = nn.Parameter(torch.empty(hidden_size)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension of `x`, which is contiguous."""
        return self.kernels.add_layer_norm(None, x, self.weight, self.bias, self.eps)

    def add_norm(
        self, x: torch.Tensor | None, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Do what `RMSNorm.add_norm` does."""
        normed = self.kernels.add_layer_norm(x, residual, self.weight, self.bias, self.eps)
        return normed, residual


Norm = RMSNorm | LayerNorm
