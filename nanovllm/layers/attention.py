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
        split_sizes: tuple[int, int, int],
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
        rotary_emb: RotaryEmbedding,
        batch: Batch,
    ) -> torch.Tensor:
        """Prepare queries and keys, store keys and values, and attend.

        Args:
            qkv: [T, sum(split_sizes)], the projections side by side.
            split_sizes: widths of q, k and v.
            q_norm, k_norm: applied to each head before its rotation; None: only rotate.

        Returns:
            [T, num_heads, head_dim].
        """
        if self.backend.fuses_qk_norm:
            norm = QKNorm(None, None, 0.0, rotary_emb.cos_sin)
            if q_norm is not None and k_norm is not None:
                norm = QKNorm(q_norm.weight, k_norm.weight, q_norm.eps, rotary_emb.cos_sin)
            return self.backend.forward_qkv(qkv, norm, self.kv_cache, batch)
        head_dim = rotary_emb.cos_sin.shape[-1]
        parts = torch.split(qkv, list(split_sizes), dim=-1)
        q, k, v = (part.reshape(len(qkv), -1, head_dim) for part in parts)
        if q_norm is not None and k_norm is not None:
            q, k = q_norm(q), k_norm(k)
        q, k = rotary_emb(batch.positions, q, k)
        return self.backend.forward(q, k, v, self.kv_cache, batch)
