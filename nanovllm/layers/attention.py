"""The attention layer. It holds the KV cache of one model layer and calls the attention backend."""

import torch
from torch import nn

from nanovllm.attention.backend import Backend
from nanovllm.attention.batch import Batch
from nanovllm.attention.spec import PLAIN, AttentionOptions, QKNormRope
from nanovllm.kernels.torch_math import NORM_ROUNDED
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding


class Attention(nn.Module):
    """Causal attention over the paged KV cache. `bind` it to each new pool.

    Args:
        num_heads, num_kv_heads: of this rank.
        source: the layer whose keys and values this one reads; None: its own.
    """

    backend: Backend
    kv_cache: torch.Tensor
    source: "Attention | None"

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        options: AttentionOptions = PLAIN,
        source: "Attention | None" = None,
    ) -> None:
        super().__init__()
        self.sizes = num_heads, num_kv_heads, head_dim
        self.options = options
        object.__setattr__(self, "source", source)  # torch must not see it as a part of this one
        self.group = 0  # the part of a batch that has this layer's block table and plan

    def bind(self, backend: Backend, kv_cache: torch.Tensor, group: int = 0) -> None:
        """Use `kv_cache`, this layer's view of the KV pool in the layout of `backend`."""
        self.backend = backend
        self.kv_cache = kv_cache
        self.group = group

    def forward(
        self, qkv: torch.Tensor, norm: QKNormRope, batch: Batch, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Prepare queries and keys, store keys and values, and attend. See `Backend.forward`.

        Args:
            qkv: [T, (num_heads + 2 num_kv_heads) * head_dim], the projections side by side.

        Returns:
            [T, num_heads, head_dim].
        """
        batch = batch.others[self.group - 1] if self.group else batch
        return self.backend.forward(qkv, norm, self.kv_cache, batch, sinks)


def qk_norm_rope(
    q_norm: RMSNorm | None, k_norm: RMSNorm | None, rotary: RotaryEmbedding
) -> QKNormRope:
    """Return how heads are normalised, by these norms or by none, and rotated."""
    return QKNormRope(
        None if q_norm is None else q_norm.weight,
        None if k_norm is None else k_norm.weight,
        0.0 if q_norm is None else q_norm.eps,
        rotary.cos_sin,
        NORM_ROUNDED if q_norm is None else q_norm.kind,
        interleaved=rotary.interleaved,
        q_scale=rotary.q_scale,
    )
