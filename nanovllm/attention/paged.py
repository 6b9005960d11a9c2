"""The base of the GPU backends: flash-attn's cache layout, and the Triton kernel that normalises,
rotates and stores in one pass. Knows no attention kernel.
"""

from typing import ClassVar

import torch

from nanovllm.attention.backend import Backend
from nanovllm.attention.batch import Batch
from nanovllm.attention.spec import AttentionSpec, QKNorm


class PagedBackend(Backend):
    """KV cache of a layer: [2, num_blocks, block_size, num_kv_heads, head_dim]."""

    supports_graph: ClassVar[bool] = True

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        # Imported here, because machines without a GPU may not have triton.
        from nanovllm.kernels.triton.store import store

        self._store = store

    def store(
        self, qkv: torch.Tensor, norm: QKNorm, kv_cache: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        return self._store(
            qkv,
            positions=batch.positions,
            slot_mapping=batch.slot_mapping,
            kv_cache=kv_cache,
            num_heads=self.spec.num_heads,
            **norm._asdict(),
        )
