"""Paged attention by the flash-attn package.

Its KV-cache kernel computes batches of single tokens; its variable-length kernel computes batches
with chunks.
"""

import importlib.util
from typing import Any, ClassVar

import torch

from nanovllm.attention.backend import NO_QUANTIZED_KV, NO_VALUES_IN_KEYS
from nanovllm.attention.batch import Batch
from nanovllm.attention.spec import AttentionSpec
from nanovllm.attention.triton import PagedBackend


class FlashAttnBackend(PagedBackend):
    """Needs blocks of a multiple of 256 tokens.

    A row's result can depend on the size of the batch, because flash-attn splits keys by it.
    """

    name: ClassVar[str] = "flash-attn"
    default_block_size: ClassVar[int] = 256

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        self._varlen = flash_attn_varlen_func
        self._with_kvcache = flash_attn_with_kvcache
        # The kernel reads no block, and no entry of its table, that lies wholly before the window.
        window = (-1, -1) if spec.window is None else (spec.window - 1, 0)
        self._options: dict[str, Any] = {
            "softmax_scale": spec.scale,
            "window_size": window,
            "softcap": spec.softcap,
        }

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> str | None:
        if spec.device.type != "cuda":
            return "needs a CUDA GPU"
        if spec.dtype not in (torch.float16, torch.bfloat16):
            return f"needs float16 or bfloat16, not {str(spec.dtype).removeprefix('torch.')}"
        if spec.quantized_kv:
            return NO_QUANTIZED_KV
        if spec.sinks:
            return "has no attention sinks"
        if spec.value_dim:
            return NO_VALUES_IN_KEYS
        if spec.head_dim % 8 or spec.head_dim > 256:
            return f"head_dim {spec.head_dim} is no multiple of 8 up to 256"
        if spec.block_size is not None and spec.block_size % 256:
            return f"kvcache_block_size {spec.block_size} is no multiple of 256"
        capability = torch.cuda.get_device_capability(spec.device)
        if capability < (8, 0):
            return f"compute capability {capability[0]}.{capability[1]} is below 8.0"
        if importlib.util.find_spec("flash_attn") is None:
            return "the flash-attn package is not installed"
        try:
            importlib.import_module("flash_attn")
        except ImportError as error:  # for example, built for another version of torch
            return f"the flash-attn package cannot be imported: {error}"
        return None

    def plan(self, batch: Batch) -> dict[str, Any] | None:
        """Return what `_varlen` needs besides the batch; None if no row has several tokens."""
        if batch.lengths is None or max(batch.lengths.query_lens) == 1:
            return None
        cu_seqlens_k = torch.zeros_like(batch.cu_seqlens_q)
        torch.cumsum(batch.seq_lens, 0, out=cu_seqlens_k[1:])
        return {
            "cu_seqlens_k": cu_seqlens_k,
            "max_seqlen_q": max(batch.lengths.query_lens),
            "max_seqlen_k": max(batch.lengths.seq_lens),
        }

    def attend(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: Batch,
        out: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        keys, values = kv_cache.unbind()
        found: torch.Tensor
        if batch.metadata is None:
            found = self._with_kvcache(
                q[:, None],
                keys,
                values,
                cache_seqlens=batch.seq_lens,
                block_table=batch.block_tables,
                causal=True,
                **self._options,
            )
            found = found[:, 0]
        else:
            found = self._varlen(
                q,
                keys,
                values,
                cu_seqlens_q=batch.cu_seqlens_q,
                causal=True,
                block_table=batch.block_tables,
                **batch.metadata,
                **self._options,
            )
        return found if out is None else out.copy_(found)
