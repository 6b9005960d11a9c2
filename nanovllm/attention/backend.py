"""The contract between the model and an attention kernel: `AttentionSpec` and `Backend`.

A backend owns the layout of the KV cache. One causal variable-length call computes a batch that
mixes prompts, chunks and single tokens. Knows no kernel and no model.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch

from nanovllm.attention.batch import Batch


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """What a model needs from attention on one rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    block_size: int | None
    """Tokens in a KV block; None lets the backend choose."""
    kv_dtype: torch.dtype | None = None
    """The KV cache's dtype; None means `dtype`."""

    @property
    def quantized_kv(self) -> bool:
        """Whether keys and values are stored in another dtype than the queries'."""
        return self.kv_dtype not in (None, self.dtype)


NO_QUANTIZED_KV = "does not support an 8-bit KV cache"
"""The reason of the backends that refuse every spec with `quantized_kv`."""


@dataclasses.dataclass(frozen=True)
class QKNorm:
    """How a layer prepares queries and keys for attention: RMSNorm or none, then rotation."""

    q_weight: torch.Tensor | None
    """[head_dim]; None: no RMSNorm. Queries and keys have one both, or none both."""
    k_weight: torch.Tensor | None
    """[head_dim]."""
    eps: float
    cos_sin: torch.Tensor
    """[positions, head_dim] float32: cosines, then sines."""


class Backend(Protocol):
    """An attention kernel with its KV cache layout.

    All implement `attend`; a backend with `fuses_qk_norm` also implements `store`, and any other
    `forward`, which ends with `attend_or_leave_out`.
    """

    name: ClassVar[str]
    fuses_qk_norm: ClassVar[bool]
    """Whether `store` also normalises and rotates; the layer then calls `forward_qkv`."""
    supports_graph: ClassVar[bool]
    """Whether a CUDA graph can capture `plan` and the attention for rows of one token. In such a
    batch the host tuples are empty, the tensors keep their addresses, and a row of length 0 does
    nothing. Several rows may be of one sequence, at consecutive positions, with the same block
    table: the KV of the whole batch is stored before any row attends. So a graph needs no rows of
    several tokens."""
    supports_recording: ClassVar[bool]
    """Whether `kernels.cpu.recording` can record the attention: C kernels compute all of it, and
    it needs no plan."""
    blocks_lie_apart: ClassVar[bool] = False
    """Whether a layer's cache may be a view whose blocks, dimension 1, lie apart; else it is
    contiguous."""
    spec: AttentionSpec
    store: Callable[..., torch.Tensor]
    """The kernel that normalises and rotates queries and keys, stores keys and values in the cache
    and returns the queries: `store` of `kernels.cpu.ops` or `kernels.triton.ops`."""
    block_size: int
    """Tokens in a KV block: the spec's, or the backend's choice."""

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> str | None:
        """Return why this backend does not support `spec`, or None if it does."""
        ...

    def __init__(self, spec: AttentionSpec) -> None: ...

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Return the shape of one layer's KV cache, which holds keys and values.

        Dimension 1 is `num_blocks`. In the last block of a row, the slots past its last token hold
        finite numbers: see `Schedule.blocks_to_zero`.
        """
        ...

    def plan(self, batch: Batch) -> Any:
        """Return the batch's `metadata`, computed once for all layers.

        The tensors of all layers must have the same dtypes and the same alignment: a plan may keep
        the kernel that was compiled for the first layer.
        """
        ...

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: Batch,
    ) -> torch.Tensor:
        """Store `k` and `v` [T, num_kv_heads, head_dim], then attend with `q`.

        Returns [T, num_heads, head_dim], the shape of `q`. A token attends to its own position and
        all earlier ones.
        """
        raise NotImplementedError

    def forward_qkv(
        self, qkv: torch.Tensor, norm: QKNorm, kv_cache: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """Do what `forward` does, from the projection `qkv`, not yet normalised and rotated.

        Args:
            qkv: [T, (num_heads + 2 num_kv_heads) * head_dim].
        """
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
        return self.attend_or_leave_out(q, kv_cache, batch)

    def attend_or_leave_out(
        self, q: torch.Tensor, kv_cache: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """Call `attend`, or `batch.attend` in its place if the batch has one."""
        if batch.attend is not None:
            return batch.attend(self.attend, q, kv_cache)
        return self.attend(q, kv_cache, batch)

    def attend(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: Batch,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return attention [T, num_heads, head_dim] of `q` over the cache, which holds all KV.

        Args:
            out: contiguous, for the result; None: a new tensor.
        """
        ...
