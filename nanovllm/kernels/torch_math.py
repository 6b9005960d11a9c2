"""RMSNorm and rotation in plain torch."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMSNorm (arXiv 1910.07467) of the last dimension, rounded as in transformers.

    The mean square is computed in float32, whatever the dtype.
    """
    x_float = x.float()
    scale = torch.rsqrt(x_float.square().mean(-1, keepdim=True) + eps)
    return (x_float * scale).to(x.dtype) * weight


def rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate each pair (i, i + head_dim / 2) of the heads x [T, heads, head_dim] by its angle.

    Args:
        cos_sin: [T, head_dim] float32: cosines, then sines, of each token.
    """
    cos, sin = cos_sin[:, None].chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.to(x.dtype)
