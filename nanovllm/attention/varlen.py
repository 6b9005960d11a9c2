"""Paged attention by torch's variable-length attention: FlashAttention-2 without the flash-attn
package.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from nanovllm.attention.batch import Batch
from nanovllm.attention.paged import PagedBackend, flash_attention_refusal, flash_attention_window
from nanovllm.attention.spec import AttentionSpec


@dataclasses.dataclass(frozen=True)
class _Lengths:
    """Lengths of a batch's rows; the maxima may be larger than the longest row."""

    cu_seqlens_k: torch.Tensor
    """[R + 1] int32."""
    max_query_len: int
    max_seq_len: int


class VarlenBackend(PagedBackend):
    """Needs blocks of a multiple of 256 tokens: with others torch returns wrong results."""

    name: ClassVar[str] = "varlen"
    default_block_size: ClassVar[int] = 256

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> str | None:
        if (reason := flash_attention_refusal(spec)) is not None:
            return reason
        if spec.softcap:
            return "varlen_attn has no softcap"
        parameters = inspect.signature(_varlen_attn()).parameters
        if "block_table" not in parameters:
            return f"varlen_attn of torch {torch.__version__} takes no block table"
        if spec.scale is not None and "scale" not in parameters:
            return f"varlen_attn of torch {torch.__version__} takes no scale"
        return None

    def plan(self, batch: Batch) -> _Lengths:
        cu_seqlens_k = torch.zeros_like(batch.cu_seqlens_q)
        torch.cumsum(batch.seq_lens, 0, out=cu_seqlens_k[1:])
        if batch.lengths is None:
            return _Lengths(cu_seqlens_k, 1, batch.block_tables.shape[1] * self.block_size)
        query_lens, seq_lens = batch.lengths
        return _Lengths(cu_seqlens_k, max(query_lens), max(seq_lens))

    def attend(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: Batch,
        out: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        keys, values = kv_cache.unbind()
        lengths: _Lengths = batch.metadata
        found = _varlen_attn()(
            q,
            keys,
            values,
            batch.cu_seqlens_q,
            lengths.cu_seqlens_k,
            lengths.max_query_len,
            lengths.max_seq_len,
            window_size=flash_attention_window(self.spec),
            enable_gqa=True,
            seqused_k=batch.seq_lens,
            block_table=batch.block_tables,
            num_splits=1,  # more leave rows after the first one unwritten (pytorch #194167)
            **({} if self.spec.scale is None else {"scale": self.spec.scale}),
        )
        assert isinstance(found, torch.Tensor)
        return found if out is None else out.copy_(found)


def _varlen_attn() -> Callable[..., Any]:
    """Import torch's function late: it imports torch._dynamo, which takes seconds."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn
