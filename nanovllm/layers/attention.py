"""The attention layer: holds its layer's KV cache and hands the work to the backend."""

import torch
from torch import nn

from nanovllm.attention.backend import Backend, Batch


class Attention(nn.Module):
    """Causal attention over the paged KV cache. `bind` gives it its cache once, at start."""

    backend: Backend
    kv_cache: torch.Tensor

    def bind(self, backend: Backend, kv_cache: torch.Tensor) -> None:
        """Use `kv_cache`, a layer's view of the pool, laid out by `backend`."""
        self.backend = backend
        self.kv_cache = kv_cache

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """Return [T, num_heads, head_dim] for q, k, v of [T, heads, head_dim]."""
        return self.backend.forward(q, k, v, self.kv_cache, batch)
