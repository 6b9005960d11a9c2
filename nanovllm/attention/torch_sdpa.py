"""Paged attention in plain torch: gather a row's blocks, then call scaled_dot_product_attention.

Runs on every device, and is the reference for the tests of faster backends. Single-token rows of
similar length share one padded call. Windows, soft caps and sinks, which that function does not
compute, are written out, a row at a time.
"""

import dataclasses
from typing import ClassVar

import torch
from torch.nn.functional import scaled_dot_product_attention

from nanovllm.attention.backend import NO_QUANTIZED_KV, Backend
from nanovllm.attention.batch import Batch
from nanovllm.attention.spec import AttentionSpec, QKNormRope

_PADDING = 1.25
"""Rows share a call if the longest has at most this factor times the shortest row's blocks, plus
one block."""
_MAX_GATHERED_TOKENS = 65536  # maximum tokens whose K and V one call of several rows copies


@dataclasses.dataclass(frozen=True)
class _Singles:
    """One call for rows of one token each, padded to the longest. Most of them decode."""

    tokens: torch.Tensor  # [R] int64, index of each row's token
    blocks: torch.Tensor  # [R, width] int64 block ids
    # [R, 1, 1, width * block_size] bool, true for the keys of the row's sequence.
    mask: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Chunk:
    """One call for a row of several tokens, over the first num_keys keys of its blocks."""

    start: int
    stop: int
    blocks: torch.Tensor  # [width] int64 block ids, from that of the first key on
    num_keys: int
    # [tokens, num_keys] bool, true for the keys that a token sees; None: those up to it from key 0
    # on, or all.
    mask: torch.Tensor | None


class TorchBackend(Backend):
    """KV cache of a layer: [2, num_blocks, block_size, num_kv_heads, head_dim], or 1 in place of 2
    where the values are a part of the keys.
    """

    name: ClassVar[str] = "torch"
    default_block_size: ClassVar[int] = 16
    blocks_lie_apart: ClassVar[bool] = True
    sees_both_ways: ClassVar[bool] = True
    sees_pictures: ClassVar[bool] = True
    _pads_singles: ClassVar[bool] = True  # whether rows of one token share calls

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> str | None:
        if spec.window or spec.softcap or spec.sinks:
            return "has no windows, soft caps and sinks"
        return NO_QUANTIZED_KV if spec.quantized_kv else None

    def plan(self, batch: Batch) -> list[_Singles | Chunk]:
        plans: list[_Singles | Chunk] = []
        singles: list[tuple[int, int, int]] = []  # (blocks, row, token)
        start = 0
        assert batch.lengths is not None, "graphs are not supported"
        for row, (query_len, seq_len) in enumerate(zip(*batch.lengths, strict=True)):
            if query_len == 1 and self._pads_singles:
                singles.append((-(-seq_len // self.block_size), row, start))
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
        self, qkv: torch.Tensor, norm: QKNormRope, kv_cache: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        q, k, v = norm.apply(qkv, batch.angle_rows, self.spec)
        if k is None or v is None:  # the cache is another layer's
            return q
        blocks = batch.slot_mapping // self.block_size  # they may lie apart
        places = blocks, batch.slot_mapping % self.block_size
        for cached, new in zip(kv_cache, (k, v), strict=False):
            cached.index_put_(places, new)
        return q

    def _keys_and_values(self, cached: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the parts of `cached` [2, ..., head_dim]; [1, ..., head_dim] has keys alone."""
        value_dim = self.spec.value_dim
        return cached[0], cached[0, ..., -value_dim:] if value_dim else cached[1]

    def attend(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: Batch,
        out: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = self.make_output(q) if out is None else out
        for plan in batch.metadata:
            if isinstance(plan, Chunk):
                queries = q[plan.start : plan.stop]
                out[plan.start : plan.stop] = self._chunk(queries, kv_cache, plan, sinks)
            else:
                out[plan.tokens] = self._singles(q[plan.tokens], kv_cache, plan)
        return out

    def _ends(self, batch: Batch) -> torch.Tensor | None:
        return batch.ends if self.spec.sees_pictures else None

    def _plan_singles(self, batch: Batch, rows: list[tuple[int, int, int]]) -> _Singles:
        device = batch.input_ids.device
        width = rows[-1][0]
        row_ids, tokens = torch.tensor([[row, token] for _, row, token in rows], device=device).T
        seq_lens = batch.seq_lens[row_ids]
        # Columns past a row's last block may hold ids out of range: replace them by its first.
        columns = torch.arange(width, device=device)
        tables = batch.block_tables[row_ids, :width].long()
        valid = columns * self.block_size < seq_lens[:, None]
        blocks = torch.where(valid, tables, tables[:, :1])
        keys = torch.arange(width * self.block_size, device=device)
        return _Singles(tokens, blocks, (keys < seq_lens[:, None])[:, None, None])

    def _plan_chunk(
        self, batch: Batch, row: int, start: int, query_len: int, seq_len: int
    ) -> Chunk:
        blocks = batch.block_tables[row, : -(-seq_len // self.block_size)].long()
        mask = None
        ends = self._ends(batch)
        if (query_len < seq_len or ends is not None) and self.spec.causal:
            keys = torch.arange(seq_len, device=blocks.device)
            last = keys[seq_len - query_len :, None]
            if ends is not None:
                last = ends[start : start + query_len, None] - 1
            mask = keys <= last
        return Chunk(start, start + query_len, blocks, seq_len, mask)

    def _singles(self, q: torch.Tensor, kv_cache: torch.Tensor, plan: _Singles) -> torch.Tensor:
        num_rows = plan.blocks.shape[0]
        num_kv_heads = self.spec.num_kv_heads
        # [2, R, width, block_size, kv_heads, head_dim] -> k and v [R, kv_heads, keys, head_dim]
        k, v = self._keys_and_values(kv_cache[:, plan.blocks].flatten(2, 3).transpose(2, 3))
        # The query heads that share a KV head become the rows of one query matrix.
        grouped = q.view(num_rows, num_kv_heads, -1, self.spec.head_dim)
        mask = plan.mask
        scale = self.spec.scale
        found = scaled_dot_product_attention(grouped, k, v, mask, scale=scale)
        return found.reshape(num_rows, -1, self.spec.output_dim)

    def _chunk(
        self, q: torch.Tensor, kv_cache: torch.Tensor, plan: Chunk, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        cached = kv_cache[:, plan.blocks].flatten(1, 2)[:, : plan.num_keys].transpose(1, 2)
        k, v = self._keys_and_values(cached)
        out = scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k[None],
            v[None],
            attn_mask=plan.mask,
            is_causal=self.spec.causal and plan.mask is None,
            scale=self.spec.scale,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)


class TorchExplicitBackend(TorchBackend):
    """The torch backend for all causal specs. Scores and weights are float32."""

    sees_both_ways: ClassVar[bool] = False
    _pads_singles: ClassVar[bool] = False

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> str | None:
        return NO_QUANTIZED_KV if spec.quantized_kv else None

    def _plan_chunk(
        self, batch: Batch, row: int, start: int, query_len: int, seq_len: int
    ) -> Chunk:
        device = batch.block_tables.device
        position = seq_len - query_len
        window = self.spec.window or seq_len
        first = max(0, position - window + 1) // self.block_size
        last = -(-seq_len // self.block_size)
        keys = torch.arange(first * self.block_size, seq_len, device=device)
        queries = torch.arange(position, seq_len, device=device)[:, None]
        ends = self._ends(batch)
        seen = queries if ends is None else ends[start : start + query_len, None] - 1
        mask = (keys <= seen) & (keys > queries - window)
        blocks = batch.block_tables[row, first:last].long()
        return Chunk(start, start + query_len, blocks, len(keys), mask)

    def _chunk(
        self, q: torch.Tensor, kv_cache: torch.Tensor, plan: Chunk, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        spec = self.spec
        scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
        cached = kv_cache[:, plan.blocks].flatten(1, 2)[:, : plan.num_keys].transpose(1, 2)
        k, v = self._keys_and_values(cached)
        assert plan.mask is not None
        heads = q.transpose(0, 1)
        found = explicit_attention(heads, k, v, plan.mask, scale, spec.softcap, sinks)
        return found.transpose(0, 1)


def explicit_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return attention of q [..., H, n, D] over k and v [..., KV, m, D]: [..., H, n, D].

    Args:
        mask: bool, true for the keys that a query sees; its shape broadcasts to [..., H, n, m].
        softcap, sinks: see `AttentionSpec`.
    """
    group = q.shape[-3] // k.shape[-3]
    k = k.repeat_interleave(group, -3)
    v = v.repeat_interleave(group, -3)
    scores = (q.float() @ k.float().mT) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        columns = sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, columns], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ v.float()).to(q.dtype)
