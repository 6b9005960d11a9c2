"""The contract between the model and an attention kernel: `AttentionSpec` and `Backend`.

A backend owns the layout of the KV cache. One causal variable-length call computes a batch that
mixes prompts, chunks and single tokens. Knows no kernel and no model.
"""

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple

import torch

from nanovllm.attention.batch import Batch
from nanovllm.kernels.torch_math import rms_norm, rotate


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


class QKNorm(NamedTuple):
    """How a layer prepares queries and keys for attention: RMSNorm or none, then rotation.

    A backend may fuse all of this into its `store`, so it gets the weights and not the layers.
    """

    q_weight: torch.Tensor | None
    """[head_dim]; None: no RMSNorm. Queries and keys have one both, or none both."""
    k_weight: torch.Tensor | None
    """[head_dim]."""
    eps: float
    cos_sin: torch.Tensor
    """[positions, head_dim] float32: cosines, then sines."""

    def apply(
        self, qkv: torch.Tensor, positions: torch.Tensor, num_heads: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split `qkv`, then normalise and rotate, in plain torch.

        Return queries [T, num_heads, head_dim], keys and values [T, num_kv_heads, head_dim].
        """
        head_dim = self.cos_sin.shape[1]
        num_kv_heads = (qkv.shape[1] // head_dim - num_heads) // 2
        heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, head_dim)
        q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], 1)
        if self.q_weight is not None and self.k_weight is not None:
            q, k = rms_norm(q, self.q_weight, self.eps), rms_norm(k, self.k_weight, self.eps)
        cos_sin = self.cos_sin[positions]
        return rotate(q, cos_sin), rotate(k, cos_sin), v


class Backend(abc.ABC):
    """An attention kernel with its KV cache layout: it stores keys and values, then attends."""

    name: ClassVar[str]
    supports_graph: ClassVar[bool]
    """Whether a CUDA graph can capture `plan` and the attention for rows of one token. In such a
    batch `lengths` is None, the tensors keep their addresses, and a row of length 0 does nothing.
    Several rows may be of one sequence, at consecutive positions, with the same block table: the KV
    of the whole batch is stored before any row attends. So a graph needs no rows of several
    tokens."""
    supports_recording: ClassVar[bool]
    """Whether `kernels.cpu.recording` can record the attention: C kernels compute all of it, and
    it needs no plan."""
    blocks_lie_apart: ClassVar[bool] = False
    """Whether a layer's cache may be a view whose blocks, dimension 1, lie apart; else it is
    contiguous."""
    spec: AttentionSpec
    block_size: int
    """Tokens in a KV block: the spec's, or the backend's choice."""

    @classmethod
    @abc.abstractmethod
    def unsupported(cls, spec: AttentionSpec) -> str | None:
        """Return why this backend does not support `spec`, or None if it does."""

    @abc.abstractmethod
    def __init__(self, spec: AttentionSpec) -> None:
        """Set `spec` and `block_size`."""

    @abc.abstractmethod
    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Return the shape of one layer's KV cache, which holds keys and values.

        Dimension 1 is `num_blocks`. In the last block of a row, the slots past its last token hold
        finite numbers: see `Schedule.blocks_to_zero`.
        """

    @abc.abstractmethod
    def plan(self, batch: Batch) -> Any:
        """Return the batch's `metadata`, computed once for all layers.

        The tensors of all layers must have the same dtypes and the same alignment: a plan may keep
        the kernel that was compiled for the first layer.
        """

    def forward(
        self, qkv: torch.Tensor, norm: QKNorm, kv_cache: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """Store the keys and values of `qkv`, then attend with its queries.

        A token attends to its own position and all earlier ones.

        Args:
            qkv: [T, (num_heads + 2 num_kv_heads) * head_dim] contiguous, not yet normalised and
                rotated.

        Returns:
            [T, num_heads, head_dim].
        """
        q = self.store(qkv, norm, kv_cache, batch)
        if batch.attend is not None:
            return batch.attend(self.attend, q, kv_cache)
        return self.attend(q, kv_cache, batch)

    @abc.abstractmethod
    def store(
        self, qkv: torch.Tensor, norm: QKNorm, kv_cache: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """Normalise and rotate queries and keys, store keys and values; return the queries."""

    @abc.abstractmethod
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
