"""An attention backend stores keys and values, and attends. This one takes token after token.

Run it in the folder of this file:

    PYTHONPATH=. nanovllm serve MODEL --attention-backend my_backend:MyBackend

The contract is nanovllm/attention/backend.py; nanovllm/attention/triton.py has a base for GPUs with
flash-attn's layout.
"""

from typing import ClassVar

import torch

from nanovllm.attention.backend import NO_QUANTIZED_KV, NO_VALUES_IN_KEYS, Backend
from nanovllm.attention.batch import Batch
from nanovllm.attention.spec import AttentionSpec, QKNormRope


class MyBackend(Backend):
    """KV cache of a layer: [2, num_blocks, block_size, num_kv_heads, head_dim].

    A model whose layers differ has a backend for each kind, and a `spec` for each.
    """

    name: ClassVar[str] = "my_backend"
    default_block_size: ClassVar[int] = 16
    blocks_lie_apart: ClassVar[bool] = True  # kv_cache may be a view: index it, do not flatten it

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> str | None:
        """Return why it cannot serve such layers: the user reads it. Never ignore a setting."""
        if spec.window or spec.softcap or spec.sinks:
            return "has no windows, soft caps and sinks"
        if spec.value_dim:
            return NO_VALUES_IN_KEYS
        return NO_QUANTIZED_KV if spec.quantized_kv else None

    def plan(self, batch: Batch) -> None:
        """Return what all layers of a step need, which they find in `batch.metadata`."""

    def store(
        self, qkv: torch.Tensor, norm: QKNormRope, kv_cache: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """Store the step's keys and values; return the queries [T, num_heads, head_dim]."""
        q, k, v = norm.apply(qkv, batch.positions, self.spec)
        if k is not None and v is not None:
            slots = batch.slot_mapping
            kv_cache[:, slots // self.block_size, slots % self.block_size] = torch.stack([k, v])
        return q

    def attend(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: Batch,
        out: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return [T, num_heads, head_dim]: each token attends to its own and earlier positions."""
        assert batch.lengths is not None  # it is None in CUDA graphs, see supports_graph
        out = torch.empty_like(q) if out is None else out
        scale = self.spec.head_dim**-0.5 if self.spec.scale is None else self.spec.scale
        group = self.spec.num_heads // self.spec.num_kv_heads
        token = 0
        for row, (query_len, seq_len) in enumerate(zip(*batch.lengths, strict=True)):
            # Columns past a row's last block may hold any number: read only its own.
            blocks = batch.block_tables[row, : -(-seq_len // self.block_size)].long()
            keys, values = kv_cache[:, blocks].flatten(1, 2).repeat_interleave(group, 2)
            for seen in range(seq_len - query_len + 1, seq_len + 1):
                scores = torch.einsum("hd,shd->hs", q[token], keys[:seen])
                weights = (scores * scale).softmax(-1)
                out[token] = torch.einsum("hs,shd->hd", weights, values[:seen])
                token += 1
        return out
