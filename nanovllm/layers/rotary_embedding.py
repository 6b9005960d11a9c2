"""Rotary position embedding (arXiv 2104.09864): the angles. `kernels.torch_math` rotates."""

import torch
from torch import nn


class RotaryEmbedding(nn.Module):
    """The angles by which a head's pairs (i, i + head_dim / 2) rotate, for each position.

    Args:
        inv_freq: [head_dim / 2] float32, on the CPU: the radians per position of each pair, as
            `RopeConfig.inverse_frequencies` in rope_scaling.py returns them.
        scale: factor on cosines and sines; 1.0 without rope scaling.
    """

    cos_sin: torch.Tensor
    """[max_position, head_dim] float32: cosines, then sines."""

    def __init__(self, max_position: int, inv_freq: torch.Tensor, scale: float = 1.0) -> None:
        super().__init__()
        angles = torch.arange(max_position, dtype=torch.float32, device="cpu")[:, None] * inv_freq
        device = torch.get_default_device()
        cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1) * scale
        self.register_buffer("cos_sin", cos_sin.to(device), persistent=False)
