"""Norms, rotation and activations in plain torch."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

NORM_ROUNDED, NORM_WIDE, NORM_CENTRED = range(3)
"""How an RMSNorm applies its weight. Llama rounds the normalised numbers to their dtype first.
Gemma 4, Olmo and gpt-oss multiply in float32 and round once; Gemma 2 and 3 with 1 + weight."""

OAI_LIMIT = 7.0
OAI_ALPHA = 1.702
"""Constants of `swiglu_oai`: the limit of gate and up, and the factor in the sigmoid."""


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, kind: int = NORM_ROUNDED
) -> torch.Tensor:
    """Return the RMSNorm (arXiv 1910.07467) of the last dimension, rounded as in transformers.

    The mean square is computed in float32, whatever the dtype.

    Args:
        x: [..., n].
        weight: [n]; None: no weight.
        kind: one of the NORM constants above.
    """
    x_float = x.float()
    normed = x_float * torch.rsqrt(x_float.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(x.dtype)
    if kind == NORM_ROUNDED:
        return normed.to(x.dtype) * weight
    factor = weight.float() + 1.0 if kind == NORM_CENTRED else weight.float()
    return (normed * factor).to(x.dtype)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Return the LayerNorm (arXiv 1607.06450) of the last dimension, computed in float32.

    Args:
        x: [..., n].
        weight: [n].
        bias: [n]; None: no bias.
    """
    wide_bias = None if bias is None else bias.float()
    normed = F.layer_norm(x.float(), weight.shape, weight.float(), wide_bias, eps)
    return normed.to(x.dtype)


def rotate(x: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Rotate each pair (i, i + rotary_dim / 2) of the heads x [T, heads, head_dim] by its angle.

    Numbers from rotary_dim on stay.

    Args:
        cos_sin: [T, rotary_dim] float32: cosines, then sines, of each token.
        interleaved: the pairs of x are (2i, 2i + 1). Those of the result are as above.
    """
    rotary_dim = cos_sin.shape[-1]
    cos, sin = cos_sin[:, None].chunk(2, dim=-1)
    pairs = x[..., :rotary_dim].float()
    rest = x[..., rotary_dim:]
    first, second = pairs.chunk(2, dim=-1)
    if interleaved:
        first = pairs[..., ::2]
        second = pairs[..., 1::2]
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([rotated.to(x.dtype), rest], dim=-1) if rest.shape[-1] else rotated.to(x.dtype)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "identity": lambda x: x,
}
"""By name: "gelu" is the exact one, by erf, and "relu2" the square of ReLU."""


def activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """Return the activation of each number of `x`: see `ACTIVATIONS`."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is none of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[activation](x)


def swiglu_oai(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return the clamped SwiGLU of gpt-oss, computed in float32 and rounded once.

    Args:
        gate, up: [..., n].
    """
    bounded = gate.float().clamp(max=OAI_LIMIT)
    product = bounded * torch.sigmoid(OAI_ALPHA * bounded)
    return (product * (up.float().clamp(-OAI_LIMIT, OAI_LIMIT) + 1.0)).to(gate.dtype)
