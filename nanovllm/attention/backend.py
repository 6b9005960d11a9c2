"""The contract between the model and an attention kernel, and the choice of one at start.

A backend owns the KV cache's layout. One causal variable-length call covers a batch that mixes
prompts, chunks and single tokens.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch

from nanovllm.attention.batch import Batch


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """What a model asks of attention on one rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    block_size: int | None
    """None: the backend chooses."""
    kv_dtype: torch.dtype | None = None
    """Of the KV cache; None is `dtype`."""

    @property
    def quantized_kv(self) -> bool:
        """Whether keys and values are stored in another dtype than queries have."""
        return self.kv_dtype not in (None, self.dtype)


NO_QUANTIZED_KV = "does not support an 8-bit KV cache"
"""Why most backends refuse a spec that `quantized_kv`."""


@dataclasses.dataclass(frozen=True)
class QKNorm:
    """What a layer does to queries and keys before they meet: normalise, then rotate."""

    q_weight: torch.Tensor
    """[head_dim]."""
    k_weight: torch.Tensor
    """[head_dim]."""
    eps: float
    cos_sin: torch.Tensor
    """[positions, head_dim] float32, cosines then sines."""


class Backend(Protocol):
    """An attention kernel with its KV cache layout.

    It has `forward`, or (`fuses_qk_norm`) `store`, which normalises and rotates on the way, and
    `attend`.
    """

    name: ClassVar[str]
    fuses_qk_norm: ClassVar[bool]
    supports_graph: ClassVar[bool]
    """Whether a CUDA graph can hold `plan` and `forward` for rows of one token: the batch's host
    tuples are empty then, its tensors stay where they are, and a row of length 0 does nothing."""
    supports_recording: ClassVar[bool]
    """Whether the CPU recorder (`kernels.cpu.recording`) can record the backend's work: every
    computation is a call of a C kernel, and `plan` returns None."""
    spec: AttentionSpec
    store: Callable[..., torch.Tensor]
    """The kernel of `forward_qkv` that fills the cache and returns the queries: `cpu_ops.store`,
    `gpu.store`."""
    block_size: int
    """Tokens in a KV block: the spec's, or the backend's choice."""

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> str | None:
        """Return why this backend cannot serve `spec`, or None if it can."""
        ...

    def __init__(self, spec: AttentionSpec) -> None: ...

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Return the shape of one layer's KV cache, keys and values together."""
        ...

    def plan(self, batch: Batch) -> Any:
        """Return what `forward` needs to know of `batch`, computed once for all layers."""
        ...

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: Batch,
    ) -> torch.Tensor:
        """Store `k` and `v` [T, num_kv_heads, head_dim], attend with `q` [T, num_heads, head_dim].

        Returns [T, num_heads, head_dim]. Token i of a row sees positions up to its own.
        """
        raise NotImplementedError

    def forward_qkv(
        self, qkv: torch.Tensor, norm: QKNorm, kv_cache: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """Like `forward`, from `qkv` [T, (num_heads + 2 num_kv_heads) * head_dim] as projected."""
        q = self.store(
            qkv,
            norm.q_weight,
            norm.k_weight,
            norm.eps,
            norm.cos_sin,
            batch.positions,
            batch.slot_mapping,
            kv_cache,
            self.spec.num_heads,
        )
        return self.attend(q, kv_cache, batch)

    def attend(self, q: torch.Tensor, kv_cache: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return [T, num_heads, head_dim] for `q` of that shape, whose KV is in the cache."""
        raise NotImplementedError
