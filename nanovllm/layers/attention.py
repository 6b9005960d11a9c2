"""The attention layer. It holds the KV cache of one model layer and calls the attention backend."""

import torch
from torch import nn

from nanovllm.attention.backend import Backend, QKNorm
from nanovllm.attention.batch import Batch
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding


class Attention(nn.Module):
    """Causal attention over the paged KV cache. Call `bind` once before the first forward pass."""

    backend: Backend
    kv_cache: torch.Tensor

    def bind(self, backend: Backend, kv_cache: torch.Tensor) -> None:
        """Use `kv_cache`, this layer's view of the KV pool in the layout of `backend`."""
        self.backend = backend
        self.kv_cache = kv_cache

    def forward(
        self,
        qkv: torch.Tensor,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
        rotary_emb: RotaryEmbedding,
        batch: Batch,
    ) -> torch.Tensor:
        """Prepare queries and keys, store keys and values, and attend.

        Args:
            qkv: [T, (num_heads + 2 num_kv_heads) * head_dim], the projections side by side.
            q_norm, k_norm: applied to each head before its rotation; None: only rotate.

        Returns:
            [T, num_heads, head_dim].
        """
        norm = QKNorm(None, None, 0.0, rotary_emb.cos_sin)
        if q_norm is not None and k_norm is not None:
            norm = QKNorm(q_norm.weight, k_norm.weight, q_norm.eps, rotary_emb.cos_sin)
        return self.backend.forward(qkv, norm, self.kv_cache, batch)
