"""Paged attention by the C kernels, in bfloat16. One pass normalises, rotates and stores."""

from typing import ClassVar

import torch

from nanovllm.attention.backend import Backend
from nanovllm.attention.batch import Batch
from nanovllm.attention.spec import ROUNDED_KV, AttentionSpec, QKNormRope
from nanovllm.kernels.cpu import ops

MAX_HEAD_DIM = 576  # the rows of latent attention are the longest: 512 numbers, and 64 that rotate


class CPUBackend(Backend):
    """Backend for CPUs. KV cache of a layer: [num_kv_heads, num_blocks, 2, block_size, width], or 1
    in place of 2 where the values are a part of the keys.

    width is head_dim, padded to a multiple of 32; of int8, and of 4 bits in uint8, it counts
    bytes, those of scales too. cache.h defines the layout inside a block.
    """

    name: ClassVar[str] = "cpu"
    default_block_size: ClassVar[int] = 64
    blocks_lie_apart: ClassVar[bool] = True
    supports_recording: ClassVar[bool] = True
    sees_both_ways: ClassVar[bool] = True
    sees_pictures: ClassVar[bool] = True

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> str | None:
        if spec.device.type != "cpu" or spec.dtype != torch.bfloat16:
            return "needs bfloat16 on a CPU"
        if spec.kv_dtype not in (None, spec.dtype, *ROUNDED_KV):
            return "keeps keys and values in bfloat16, int8 or int4"
        if spec.head_dim % 2 or spec.head_dim > MAX_HEAD_DIM:
            return f"head_dim {spec.head_dim} is odd or above {MAX_HEAD_DIM}"
        if spec.value_dim and spec.value_dim % 2:
            return f"the values have {spec.value_dim} numbers, which is odd"
        if spec.value_dim and spec.quantized_kv:
            return "keeps keys that are also values in bfloat16"
        if spec.block_size is not None and (spec.block_size % 32 or spec.block_size > 512):
            return f"kvcache_block_size {spec.block_size} is no multiple of 32 up to 512"
        return None

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        spec = self.spec
        width = ops.cache_row(spec.head_dim, spec.kv_dtype or spec.dtype)
        halves = 1 if spec.value_dim else 2
        return (spec.num_kv_heads, num_blocks, halves, self.block_size, width)

    def plan(self, batch: Batch) -> None:
        return None

    def store(
        self, qkv: torch.Tensor, norm: QKNormRope, kv_cache: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        places = batch.angle_rows, batch.slot_mapping, kv_cache
        sizes = self.spec.num_heads, self.spec.head_dim
        return ops.store(qkv, *places, *sizes, **norm._asdict())

    def attend(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: Batch,
        out: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert (sinks is not None) == self.spec.sinks
        found = ops.attention(
            q,
            kv_cache,
            batch.block_tables,
            batch.cu_seqlens_q,
            batch.seq_lens,
            ends=batch.ends if self.spec.sees_pictures else None,
            causal=self.spec.causal,
            scale=self.spec.scale,
            window=self.spec.window,
            softcap=self.spec.softcap,
            sinks=sinks,
            value_dim=self.spec.value_dim,
        )
        return found if out is None else out.copy_(found)
