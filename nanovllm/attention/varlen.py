"""Paged attention by torch's own variable-length attention, which is FlashAttention-2 without the
package.
"""

import dataclasses
import inspect
from typing import ClassVar

import torch
from torch.nn.attention import varlen

from nanovllm.attention.backend import AttentionSpec
from nanovllm.attention.batch import Batch
from nanovllm.attention.paged import PagedBackend, flash_attention_refusal


@dataclasses.dataclass(frozen=True)
class _Lengths:
    cu_seqlens_k: torch.Tensor
    """[R + 1] int32."""
    max_query_len: int
    max_seq_len: int


class VarlenBackend(PagedBackend):
    """Blocks are a multiple of 256 tokens: torch answers wrongly with others."""

    name: ClassVar[str] = "varlen"
    default_block_size: ClassVar[int] = 256

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> str | None:
        if (reason := flash_attention_refusal(spec)) is not None:
            return reason
        if "block_table" not in inspect.signature(varlen.varlen_attn).parameters:
            return f"varlen_attn of torch {torch.__version__} takes no block table"
        return None

    def plan(self, batch: Batch) -> _Lengths:
        """A batch without host tuples, as in a CUDA graph, has rows of one token, or of none."""
        cu_seqlens_k = torch.zeros_like(batch.cu_seqlens_q)
        torch.cumsum(batch.seq_lens, 0, out=cu_seqlens_k[1:])
        return _Lengths(
            cu_seqlens_k,
            max(batch.query_lens_host, default=1),
            max(batch.seq_lens_host, default=batch.block_tables.shape[1] * self.block_size),
        )

    def attend(self, q: torch.Tensor, kv_cache: torch.Tensor, batch: Batch) -> torch.Tensor:
        keys, values = kv_cache.unbind()
        lengths: _Lengths = batch.metadata
        out = varlen.varlen_attn(
            q,
            keys,
            values,
            batch.cu_seqlens_q,
            lengths.cu_seqlens_k,
            lengths.max_query_len,
            lengths.max_seq_len,
            window_size=(-1, 0),
            enable_gqa=True,
            seqused_k=batch.seq_lens,
            block_table=batch.block_tables,
            num_splits=1,  # with more, rows after the first are left unwritten (pytorch #194167)
        )
        assert isinstance(out, torch.Tensor)
        return out
