"""Rotary position embedding (arXiv 2104.09864): which part of a head rotates, and how fast.

`RopeConfig` has a checkpoint's settings. Linear, YaRN, Llama 3 and LongRoPE scaling, a base
stretched by alpha, and factors of GGUF files make a model take longer texts. `RotaryEmbedding` has
the angles of each position; `kernels.torch_math` rotates.
"""

import dataclasses
import math

import torch
from torch import nn


class RotaryEmbedding(nn.Module):
    """The angles by which a head's pairs (i, i + rotary_dim / 2) rotate, for each position.

    rotary_dim is head_dim, or less where only the first part of a head rotates.

    Args:
        inv_freq: [rotary_dim / 2] float32, on the CPU: the radians per position of each pair, as
            `RopeConfig.inverse_frequencies` returns them.
        scale: factor on cosines and sines; 1.0 without rope scaling.
    """

    cos_sin: torch.Tensor  # [max_position, rotary_dim] float32: cosines, then sines
    interleaved = False  # for some families, as the next: see `QKNormRope`
    q_scale: torch.Tensor | None = None

    def __init__(self, max_position: int, inv_freq: torch.Tensor, scale: float = 1.0) -> None:
        super().__init__()
        device = torch.get_default_device()
        if device.type == "meta":  # only shapes are asked for
            cos_sin = torch.empty(max_position, 2 * len(inv_freq), dtype=torch.float32)
        else:
            positions = torch.arange(max_position, dtype=torch.float32, device="cpu")
            angles = positions[:, None] * inv_freq
            cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1) * scale
        self.register_buffer("cos_sin", cos_sin.to(device), persistent=False)


def inverse_frequencies(head_dim: int, theta: float) -> torch.Tensor:
    """Return the radians per position of each pair of a head: [head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    return 1.0 / theta**exponents


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """The rotary settings of a checkpoint, normalised."""

    theta: float
    # "default", "linear", "yarn", "llama3", "longrope", "proportional", "alpha" or "factors".
    rope_type: str = "default"
    factor: float = 1.0
    # Positions of the model before scaling. Only yarn, llama3 and longrope use it.
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    # Factor on cos and sin. Only yarn and longrope use it; None: derive it from `factor` and the
    # mscales.
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True  # whether the bounds of yarn's ramp are rounded to whole dimensions
    # Only llama3 uses them. A dimension that makes more rotations than the high factor over the
    # original positions keeps its angle; one that makes fewer than the low factor has it divided.
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    # [rotary_dim / 2]: what each dimension's angle is divided by. Only factors and longrope use it;
    # with longrope, in texts up to `original_max_position`.
    factors: tuple[float, ...] = ()
    # [rotary_dim / 2]: the same, of an engine whose texts may be longer. Only longrope uses it.
    long_factors: tuple[float, ...] = ()
    # The share of a head's numbers that rotate: the first ones. With "proportional" the pairs are
    # those of the whole head, and the last pairs do not rotate.
    partial: float = 1.0
    # Stretches theta, for a head of n numbers by alpha ** (n / (n - 2)). Only alpha uses it.
    alpha: float = 1.0
    # How much queries grow with the logarithm of their position (Llama 4's scaling).
    query_growth: float = 0.0

    def inverse_frequencies(
        self, head_dim: int, max_model_len: int = 0
    ) -> tuple[torch.Tensor, float]:
        """Return (radians per position [rotary_dim / 2] float32, factor on cos and sin).

        Args:
            max_model_len: the most positions of a text. LongRoPE has other angles for an engine
                with long texts, as in vLLM: one text has the same angles from start to end.
        """
        if self.rope_type == "proportional":
            inv_freq = inverse_frequencies(head_dim, self.theta) / self.factor
            inv_freq[int(self.partial * head_dim // 2) :] = 0.0
            return inv_freq, 1.0
        dim = int(head_dim * self.partial)
        inv_freq = inverse_frequencies(dim, self.theta)
        if self.rope_type == "linear":
            return inv_freq / self.factor, 1.0
        if self.rope_type == "yarn":
            return _yarn(inv_freq, dim, self)
        if self.rope_type == "llama3":
            return _llama3(inv_freq, self), 1.0
        if self.rope_type == "alpha":
            theta = self.theta * self.alpha ** (dim / max(dim - 2, 1))
            return inverse_frequencies(dim, theta), 1.0
        if self.rope_type == "longrope":
            is_long = max_model_len > self.original_max_position
            factors = self.long_factors if is_long else self.factors
            return inv_freq / _tensor(factors), _longrope_scale(self)
        if self.rope_type == "factors":
            return inv_freq / _tensor(self.factors), 1.0
        return inv_freq, 1.0

    def query_scale(self, max_position: int) -> torch.Tensor:
        """Return the factor on the queries of each position, [max_position] float32."""
        steps = torch.arange(max_position, device="cpu") // self.original_max_position
        scale = 1 + self.query_growth * torch.log1p(steps.float())
        return scale.to(torch.get_default_device())


def _tensor(values: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device="cpu")


def _longrope_scale(rope: RopeConfig) -> float:
    """Return the factor on cos and sin of LongRoPE (arXiv 2402.13753)."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position))


def _llama3(inv_freq: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Return `inv_freq` with the scaling of Llama 3.1 (transformers' modeling_rope_utils.py)."""
    rotations = rope.original_max_position * inv_freq / (2 * math.pi)
    low = rope.low_freq_factor
    high = rope.high_freq_factor
    kept = ((rotations - low) / (high - low)).clamp(0, 1)
    return inv_freq / rope.factor * (1 - kept) + inv_freq * kept


def _yarn(inv_freq: torch.Tensor, head_dim: int, rope: RopeConfig) -> tuple[torch.Tensor, float]:
    """Return what `RopeConfig.inverse_frequencies` does, with YaRN scaling (arXiv 2309.00071).

    Fast dimensions keep their angle, slow ones are divided by `factor`. Between the two a linear
    ramp mixes both.
    """

    def dimension(rotations: float) -> float:
        """Return the dimension that makes so many rotations over the original positions."""
        positions = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(positions) / (2 * math.log(rope.theta))

    low = dimension(rope.beta_fast)
    high = dimension(rope.beta_slow)
    if rope.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, head_dim - 1)
    steps = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    ramp = ((steps - low) / max(high - low, 0.001)).clamp(0, 1)
    scaled = inv_freq / rope.factor * ramp + inv_freq * (1 - ramp)
    if rope.attention_factor is not None:
        return scaled, rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scaled, mscale(rope.factor, rope.mscale) / mscale(rope.factor, rope.mscale_all_dim)
    return scaled, mscale(rope.factor, 1.0)


def mscale(factor: float, weight: float) -> float:
    """Return YaRN's factor on queries and on keys for a context that is `factor` times longer."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
