"""Paged attention written out in plain torch, a row at a time: windows, soft caps and sinks.

For what scaled_dot_product_attention does not compute. Runs on every device.
"""

import torch

from nanovllm.attention.backend import NO_QUANTIZED_KV
from nanovllm.attention.batch import Batch
from nanovllm.attention.spec import AttentionSpec
from nanovllm.attention.torch_sdpa import Chunk, TorchBackend


class TorchExplicitBackend(TorchBackend):
    """The torch backend for all specs. Scores and weights are float32."""

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> str | None:
        return NO_QUANTIZED_KV if spec.quantized_kv else None

    def plan(self, batch: Batch) -> list[Chunk]:  # type: ignore[override]
        chunks: list[Chunk] = []
        start, device = 0, batch.block_tables.device
        assert batch.lengths is not None, "graphs are not supported"
        for row, (query_len, seq_len) in enumerate(zip(*batch.lengths, strict=True)):
            position, window = seq_len - query_len, self.spec.window or seq_len
            first = max(0, position - window + 1) // self.block_size
            last = -(-seq_len // self.block_size)
            keys = torch.arange(first * self.block_size, seq_len, device=device)
            queries = torch.arange(position, seq_len, device=device)[:, None]
            mask = (keys <= queries) & (keys > queries - window)
            blocks = batch.block_tables[row, first:last].long()
            chunks.append(Chunk(start, start + query_len, blocks, len(keys), mask))
            start += query_len
        return chunks

    def _chunk(
        self, q: torch.Tensor, kv_cache: torch.Tensor, plan: Chunk, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        spec = self.spec
        scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
        k, v = kv_cache[:, plan.blocks].flatten(1, 2)[:, : plan.num_keys].transpose(1, 2)
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
    k, v = k.repeat_interleave(group, -3), v.repeat_interleave(group, -3)
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
