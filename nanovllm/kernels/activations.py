"""The activations of MLPs and gates in plain torch."""

import torch
import torch.nn.functional as F

OAI_LIMIT, OAI_ALPHA = 7.0, 1.702
"""Constants of `swiglu_oai`: the limit of gate and up, and the factor in the sigmoid."""


def activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """Return the "silu", "gelu_tanh" or "sigmoid" of each number of `x`; "identity": `x`."""
    if activation == "silu":
        return F.silu(x)
    if activation == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if activation == "sigmoid":
        return x.sigmoid()
    if activation == "identity":
        return x
    raise ValueError(f"activation {activation!r} is not silu, gelu_tanh, sigmoid or identity")


def swiglu_oai(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return the clamped SwiGLU of gpt-oss, computed in float32 and rounded once.

    Args:
        gate, up: [..., n].
    """
    bounded = gate.float().clamp(max=OAI_LIMIT)
    product = bounded * torch.sigmoid(OAI_ALPHA * bounded)
    return (product * (up.float().clamp(-OAI_LIMIT, OAI_LIMIT) + 1.0)).to(gate.dtype)
