"""Paged attention in plain torch: gather a row's blocks, then call scaled_dot_product_attention.

Runs on every device, and is the reference for the tests of faster backends. Single-token rows of
similar length share one padded call.
"""

import dataclasses
from functools import partial
from typing import ClassVar

import torch
from torch.nn.functional import scaled_dot_product_attention

from nanovllm.attention.backend import NO_QUANTIZED_KV, AttentionSpec, Backend, QKNorm
from nanovllm.attention.batch import Batch
from nanovllm.attention.explicit import explicit_attention

_PADDING = 1.25
"""Rows share a call if the longest has at most this factor times the shortest row's blocks, plus
one block."""
_MAX_GATHERED_TOKENS = 65536
"""Maximum tokens whose K and V one call of several rows copies."""


@dataclasses.dataclass(frozen=True)
class _Singles:
    """One call for rows of one token each, padded to the longest. Most of them decode."""

    tokens: torch.Tensor
    """[R] int64, index of each row's token."""
    blocks: torch.Tensor
    """[R, width] int64 block ids."""
    mask: torch.Tensor
    """[R, 1, 1, width * block_size] bool, true for the keys that the row's token sees."""


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """One call for a row of several tokens."""

    start: int
    stop: int
    blocks: torch.Tensor
    """[width] int64 block ids: all, or those from the window's first key on."""
    num_keys: int
    """Keys in these blocks."""
    mask: torch.Tensor | None
    """[tokens, num_keys] bool. None means causal: the row starts at its sequence's first token."""


class TorchBackend(Backend):
    """KV cache of a layer: [2, num_blocks, block_size, num_kv_heads, head_dim]."""

    name: ClassVar[str] = "torch"
    supports_graph: ClassVar[bool] = False
    blocks_lie_apart: ClassVar[bool] = True
    supports_recording: ClassVar[bool] = False

    def __init__(self, spec: AttentionSpec) -> None:
        self.block_size = spec.block_size or 16
        self.spec = spec
        self._scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
        self._is_special = bool(spec.softcap) or spec.sinks  # what torch's function lacks
        self._explicit = partial(explicit_attention, scale=self._scale, softcap=spec.softcap)

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> str | None:
        return NO_QUANTIZED_KV if spec.quantized_kv else None

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        return (2, num_blocks, self.block_size, self.spec.num_kv_heads, self.spec.head_dim)

    def plan(self, batch: Batch) -> list[_Singles | _Chunk]:
        plans: list[_Singles | _Chunk] = []
        singles: list[tuple[int, int, int]] = []  # (blocks, row, token)
        start = 0
        assert batch.lengths is not None, "graphs are not supported"
        for row, (query_len, seq_len) in enumerate(zip(*batch.lengths, strict=True)):
            if query_len == 1:
                num_blocks = -(-seq_len // self.block_size) - self._first_block(seq_len - 1)
                singles.append((num_blocks, row, start))
            else:
                plans.append(self._plan_chunk(batch, row, start, query_len, seq_len))
            start += query_len
        singles.sort()
        while singles:
            size = 1
            while (
                size < len(singles)
                and singles[size][0] <= _PADDING * singles[0][0] + 1
                and (size + 1) * singles[size][0] * self.block_size <= _MAX_GATHERED_TOKENS
            ):
                size += 1
            plans.append(self._plan_singles(batch, singles[:size]))
            del singles[:size]
        return plans

    def store(
        self, qkv: torch.Tensor, norm: QKNorm, kv_cache: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        q, k, v = norm.apply(qkv, batch.positions, self.spec)
        if k is None or v is None:
            return q
        blocks = batch.slot_mapping // self.block_size  # they may lie apart
        places = blocks, batch.slot_mapping % self.block_size
        for cached, new in zip(kv_cache, (k, v), strict=True):
            cached.index_put_(places, new)
        return q

    def attend(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: Batch,
        out: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = torch.empty_like(q) if out is None else out
        for plan in batch.metadata:
            tokens = slice(plan.start, plan.stop) if isinstance(plan, _Chunk) else plan.tokens
            attend = self._chunk if isinstance(plan, _Chunk) else self._singles
            out[tokens] = attend(q[tokens], kv_cache, plan, sinks)
        return out

    def _first_block(self, position: int) -> int:
        """Return the index of the first block whose keys the token at `position` sees."""
        window = self.spec.window
        return 0 if window is None else max(0, position - window + 1) // self.block_size

    def _plan_singles(self, batch: Batch, rows: list[tuple[int, int, int]]) -> _Singles:
        device = batch.input_ids.device
        width = rows[-1][0]
        row_ids, tokens = torch.tensor([[row, token] for _, row, token in rows], device=device).T
        ends = batch.seq_lens[row_ids].long()
        assert batch.lengths is not None, "graphs are not supported"
        first = [self._first_block(batch.lengths.seq_lens[row] - 1) for _, row, _ in rows]
        columns = torch.tensor(first, device=device)[:, None] + torch.arange(width, device=device)
        # Columns past a row's last block may hold ids out of range: replace them by its first.
        valid = columns * self.block_size < ends[:, None]
        columns = torch.where(valid, columns, columns[:, :1])
        blocks = batch.block_tables[row_ids[:, None], columns].long()
        keys = torch.arange(width * self.block_size, device=device)
        keys = keys + columns[:, :1] * self.block_size
        seen = keys < ends[:, None]
        if self.spec.window is not None:
            seen &= keys >= ends[:, None] - self.spec.window
        return _Singles(tokens, blocks, seen[:, None, None])

    def _plan_chunk(
        self, batch: Batch, row: int, start: int, query_len: int, seq_len: int
    ) -> _Chunk:
        position, window = seq_len - query_len, self.spec.window
        first = self._first_block(position)
        blocks = batch.block_tables[row, first : -(-seq_len // self.block_size)].long()
        keys = torch.arange(first * self.block_size, seq_len, device=blocks.device)
        mask = None
        if position or (window is not None and window < seq_len):
            queries = torch.arange(position, seq_len, device=blocks.device)[:, None]
            mask = keys <= queries
            if window is not None:
                mask &= keys > queries - window
        return _Chunk(start, start + query_len, blocks, len(keys), mask)

    def _singles(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        plan: _Singles,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        num_rows, num_kv_heads = plan.blocks.shape[0], self.spec.num_kv_heads
        # [2, R, width, block_size, kv_heads, head_dim] -> k and v [R, kv_heads, keys, head_dim]
        k, v = kv_cache[:, plan.blocks].flatten(2, 3).transpose(2, 3).unbind()
        if self._is_special:
            return self._explicit(q[:, :, None], k, v, plan.mask, sinks=sinks)[:, :, 0]
        # The query heads that share a KV head become the rows of one query matrix.
        grouped = q.view(num_rows, num_kv_heads, -1, self.spec.head_dim)
        return scaled_dot_product_attention(
            grouped, k, v, attn_mask=plan.mask, scale=self._scale
        ).reshape(q.shape)

    def _chunk(
        self, q: torch.Tensor, kv_cache: torch.Tensor, plan: _Chunk, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        k, v = kv_cache[:, plan.blocks].flatten(1, 2)[:, : plan.num_keys].transpose(1, 2).unbind()
        q = q.transpose(0, 1)
        if self._is_special:
            mask = plan.mask
            if mask is None:
                mask = torch.ones(
                    len(q[0]), plan.num_keys, dtype=torch.bool, device=q.device
                ).tril()
            return self._explicit(q, k, v, mask, sinks=sinks).transpose(0, 1)
        out = scaled_dot_product_attention(
            q[None],
            k[None],
            v[None],
            attn_mask=plan.mask,
            is_causal=plan.mask is None,
            scale=self._scale,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)
