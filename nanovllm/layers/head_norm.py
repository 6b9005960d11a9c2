"""How the modules of an attention layer prepare its heads, as a backend takes it: `QKNorm`."""

from nanovllm.attention.spec import QKNorm
from nanovllm.kernels.torch_math import NORM_ROUNDED
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding


def head_norm(q_norm: RMSNorm | None, k_norm: RMSNorm | None, rotary: RotaryEmbedding) -> QKNorm:
    """Return how heads are normalised, by these norms or by none, and rotated."""
    return QKNorm(
        None if q_norm is None else q_norm.weight,
        None if k_norm is None else k_norm.weight,
        0.0 if q_norm is None else q_norm.eps,
        rotary.cos_sin,
        NORM_ROUNDED if q_norm is None else q_norm.kind,
        interleaved=rotary.interleaved,
        q_scale=rotary.q_scale,
    )
