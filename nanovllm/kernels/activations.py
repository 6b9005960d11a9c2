"""The activations of MLPs and gates in plain torch."""

import torch
import torch.nn.functional as F


def activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """Return the "silu", "gelu_tanh" or "sigmoid" of each number of `x`."""
    if activation == "silu":
        return F.silu(x)
    if activation == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if activation == "sigmoid":
        return x.sigmoid()
    raise ValueError(f"activation {activation!r} is not silu, gelu_tanh or sigmoid")


def swiglu_oai(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return the clamped SwiGLU of gpt-oss, computed in float32 and rounded once.

    Args:
        gate, up: [..., n].
    """
    bounded = gate.float().clamp(max=7.0)
    product = bounded * torch.sigmoid(1.702 * bounded) * (up.float().clamp(-7.0, 7.0) + 1.0)
    return product.to(gate.dtype)
