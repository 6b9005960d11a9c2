"""The base of the GPU backends: flash-attn's cache layout, and the Triton kernel that normalises,
rotates and stores in one pass. Knows no attention kernel.
"""

from typing import ClassVar

import torch

from nanovllm.attention.backend import NO_QUANTIZED_KV, Backend
from nanovllm.attention.batch import Batch
from nanovllm.attention.spec import AttentionSpec, QKNorm


class PagedBackend(Backend):
    """KV cache of a layer: [2, num_blocks, block_size, num_kv_heads, head_dim]."""

    supports_graph: ClassVar[bool] = True
    supports_recording: ClassVar[bool] = False
    default_block_size: ClassVar[int]

    def __init__(self, spec: AttentionSpec) -> None:
        # Imported here, because machines without a GPU may not have triton.
        from nanovllm.kernels.triton.store import store

        self.block_size = spec.block_size or self.default_block_size
        self.spec = spec
        self._store = store

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        return (2, num_blocks, self.block_size, self.spec.num_kv_heads, self.spec.head_dim)

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


def flash_attention_window(spec: AttentionSpec) -> tuple[int, int]:
    """Return FlashAttention's window_size: how many keys before and after its own a token sees.

    The kernel reads no block of the cache, and no entry of its table, that lies wholly before it.
    """
    return (-1 if spec.window is None else spec.window - 1, 0)


def flash_attention_refusal(spec: AttentionSpec) -> str | None:
    """Return why FlashAttention-2 with the Triton store does not support `spec`, or None."""
    if spec.device.type != "cuda":
        return "needs a CUDA GPU"
    if spec.dtype not in (torch.float16, torch.bfloat16):
        return f"needs float16 or bfloat16, not {str(spec.dtype).removeprefix('torch.')}"
    if spec.quantized_kv:
        return NO_QUANTIZED_KV
    if spec.sinks:
        return "has no attention sinks"
    if spec.head_dim % 8 or spec.head_dim > 256:
        return f"head_dim {spec.head_dim} is no multiple of 8 up to 256"
    if spec.block_size is not None and spec.block_size % 256:
        return f"kvcache_block_size {spec.block_size} is no multiple of 256"
    capability = torch.cuda.get_device_capability(spec.device)
    if capability < (8, 0):
        return f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    return None
