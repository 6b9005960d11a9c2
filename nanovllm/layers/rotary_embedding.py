"""Rotary position embedding (arXiv 2104.09864): the angles. `kernels.torch_math` rotates."""

import torch
from torch import nn


class RotaryEmbedding(nn.Module):
    """The angles by which a head's pairs (i, i + rotary_dim / 2) rotate, for each position.

    rotary_dim is head_dim, or less where only the first part of a head rotates.

    Args:
        inv_freq: [rotary_dim / 2] float32, on the CPU: the radians per position of each pair, as
            `RopeConfig.inverse_frequencies` in rope_scaling.py returns them.
        scale: factor on cosines and sines; 1.0 without rope scaling.
    """

    cos_sin: torch.Tensor
    """[max_position, rotary_dim] float32: cosines, then sines."""
    interleaved = False
    q_scale: torch.Tensor | None = None
    """These two are for some families: see `QKNorm`."""

    def __init__(self, max_position: int, inv_freq: torch.Tensor, scale: float = 1.0) -> None:
        super().__init__()
        angles = torch.arange(max_position, dtype=torch.float32, device="cpu")[:, None] * inv_freq
        device = torch.get_default_device()
        cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1) * scale
        self.register_buffer("cos_sin", cos_sin.to(device), persistent=False)
