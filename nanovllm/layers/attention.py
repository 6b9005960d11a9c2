"""The attention layer. It holds the KV cache of one model layer and calls the attention backend."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from nanovllm.attention.backend import AttentionSpec, Backend, QKNorm
from nanovllm.attention.batch import Batch
from nanovllm.checkpoint.loader import Shard
from nanovllm.utils.distributed import tensor_parallel


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """What may differ from plain causal attention. The fields are those of `AttentionSpec`."""

    scale: float | None = None
    window: int | None = None
    softcap: float = 0.0
    sinks: bool = False


PLAIN = AttentionOptions()


class Attention(nn.Module):
    """Causal attention over the paged KV cache. Call `bind` once before the first forward pass.

    Args:
        num_heads, num_kv_heads: of this rank.
        source: the layer whose keys and values this one reads; None: its own.
    """

    backend: Backend
    kv_cache: torch.Tensor

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        options: AttentionOptions = PLAIN,
        source: "Attention | None" = None,
    ) -> None:
        super().__init__()
        self.sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        self.options = options
        self._source = [source] if source else []  # in a list, so that it is no part of this one
        self.group = 0  # the part of a batch that has this layer's block table and plan
        sinks = torch.empty(num_heads, dtype=torch.float32) if options.sinks else None
        self.sinks = None if sinks is None else nn.Parameter(sinks)

    @property
    def source(self) -> "Attention | None":
        return self._source[0] if self._source else None

    def spec(self, **common: Any) -> AttentionSpec:
        """Return what this layer needs of a backend; `common` is the same for all layers."""
        return AttentionSpec(**self.sizes, **vars(self.options), **common)

    def bind(self, backend: Backend, kv_cache: torch.Tensor, group: int = 0) -> None:
        """Use `kv_cache`, this layer's view of the KV pool in the layout of `backend`."""
        self.backend = backend
        self.kv_cache = kv_cache
        self.group = group

    def forward(self, qkv: torch.Tensor, norm: QKNorm, batch: Batch) -> torch.Tensor:
        """Prepare queries and keys, store keys and values, and attend.

        Args:
            qkv: [T, (num_heads + 2 num_kv_heads) * head_dim], the projections side by side.

        Returns:
            [T, num_heads, head_dim].
        """
        batch = batch.others[self.group - 1] if self.group else batch
        return self.backend.forward(qkv, norm, self.kv_cache, batch, self.sinks)

    def shards(self, prefix: str) -> Iterator[Shard]:
        """Yield this rank's sinks, if the layer has any."""
        if self.sinks is not None:
            ranks = tensor_parallel()
            size = len(self.sinks)
            yield Shard(
                f"{prefix}.sinks", (size * ranks.size,), self.sinks.data, 0, size * ranks.rank
            )
