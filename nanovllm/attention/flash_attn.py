"""Paged attention by the flash-attn package.

Its KV-cache kernel computes batches of single tokens; its variable-length kernel computes batches
with chunks.
"""

import dataclasses
import importlib.util
import inspect
from typing import Any, ClassVar

import torch

from nanovllm.attention.batch import Batch
from nanovllm.attention.paged import PagedBackend, flash_attention_refusal, flash_attention_window
from nanovllm.attention.spec import AttentionSpec


@dataclasses.dataclass(frozen=True)
class _Chunks:
    """Plan of a batch in which some row has several tokens."""

    cu_seqlens_k: torch.Tensor
    """[R + 1] int32."""
    max_query_len: int
    max_seq_len: int


class FlashAttnBackend(PagedBackend):
    """Needs blocks of a multiple of 256 tokens.

    A row's result can depend on the size of the batch, because flash-attn splits keys by it.
    """

    name: ClassVar[str] = "flash-attn"
    default_block_size: ClassVar[int] = 256

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        self._varlen, self._with_kvcache = flash_attn_varlen_func, flash_attn_with_kvcache
        self._options = _options(spec)

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> str | None:
        if (reason := flash_attention_refusal(spec)) is not None:
            return reason
        if importlib.util.find_spec("flash_attn") is None:
            return "the flash-attn package is not installed"
        try:
            from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
        except ImportError as error:  # for example, built for another version of torch
            return f"the flash-attn package cannot be imported: {error}"
        for function in (flash_attn_varlen_func, flash_attn_with_kvcache):
            for option in _options(spec).keys() - inspect.signature(function).parameters:
                return f"the flash-attn package is too old for {option}"
        return None

    def plan(self, batch: Batch) -> _Chunks | None:
        """Return None if no row has several tokens."""
        if batch.lengths is None or max(batch.lengths.query_lens) == 1:
            return None
        cu_seqlens_k = torch.zeros_like(batch.cu_seqlens_q)
        torch.cumsum(batch.seq_lens, 0, out=cu_seqlens_k[1:])
        return _Chunks(cu_seqlens_k, *map(max, batch.lengths))

    def attend(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: Batch,
        out: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        keys, values = kv_cache.unbind()
        chunks: _Chunks | None = batch.metadata
        found: torch.Tensor
        if chunks is None:
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
                cu_seqlens_k=chunks.cu_seqlens_k,
                max_seqlen_q=chunks.max_query_len,
                max_seqlen_k=chunks.max_seq_len,
                causal=True,
                block_table=batch.block_tables,
                **self._options,
            )
        return found if out is None else out.copy_(found)


def _options(spec: AttentionSpec) -> dict[str, Any]:
    """Return the arguments that differ from both functions' defaults."""
    options: dict[str, Any] = {}
    if spec.scale is not None:
        options["softmax_scale"] = spec.scale
    if spec.window is not None:
        options["window_size"] = flash_attention_window(spec)
    if spec.softcap:
        options["softcap"] = spec.softcap
    return options
