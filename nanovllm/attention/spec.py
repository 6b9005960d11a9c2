"""What a layer needs from an attention backend: `AttentionSpec`, and `QKNormRope` before it."""

import dataclasses
from typing import NamedTuple

import torch

from nanovllm.kernels.torch_math import NORM_ROUNDED, rms_norm, rotate


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """What may differ from plain causal attention."""

    # Whether a token sees no token after it; False: it sees all of its row, which has the whole
    # prompt.
    causal: bool = True
    # Whether a token also sees those after it that `Batch.ends` says: those of the same picture.
    sees_pictures: bool = False
    scale: float | None = None  # factor on scores; None: head_dim ** -0.5
    # A token sees itself and the window - 1 tokens before it; None: all before it.
    window: int | None = None
    softcap: float = 0.0  # a score s becomes softcap * tanh(s / softcap); 0.0: it stays
    # Whether each query head has a learned logit more in its softmax's denominator.
    sinks: bool = False
    # The values are the last value_dim numbers of the keys, which are kept once; None: values are
    # separate, of head_dim numbers.
    value_dim: int | None = None


PLAIN = AttentionOptions()
ROUNDED_KV = (torch.int8, torch.uint8)
"""The KV cache's dtypes with integers and their scales. torch.uint8 has two of 4 bits a byte."""


@dataclasses.dataclass(frozen=True)
class AttentionSpec(AttentionOptions):
    """What a model needs from attention on one rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    block_size: int | None  # tokens in a KV block; None lets the backend choose
    # The KV cache's dtype: None means `dtype`; or one of ROUNDED_KV, or FP8.
    kv_dtype: torch.dtype | None = None

    @property
    def quantized_kv(self) -> bool:
        """Whether keys and values are stored in another dtype than the queries'."""
        return self.kv_dtype not in (None, self.dtype)

    @property
    def output_dim(self) -> int:
        """Numbers of a head's output."""
        return self.value_dim or self.head_dim


class QKNormRope(NamedTuple):
    """How a layer prepares queries, keys and values: RMSNorm or none, and rotation.

    A backend may fuse all of this into its `store`, so it gets the weights and not the layers.
    Each step's result is rounded to the dtype.
    """

    # [head_dim]; None: no RMSNorm. Queries and keys have one both, or none both.
    q_weight: torch.Tensor | None
    k_weight: torch.Tensor | None  # [head_dim]; also None where the layer has no keys
    eps: float
    # [positions, rotary_dim] float32: cosines, then sines, for the pairs (i, i + rotary_dim / 2) of
    # a head's first rotary_dim numbers.
    cos_sin: torch.Tensor
    kind: int = NORM_ROUNDED  # one of the NORM constants of kernels/torch_math.py
    after_rotation: bool = False  # whether the norm comes after the rotation instead of before
    # Whether the pairs are (2i, 2i + 1) instead. The rotated queries and keys have them at (i, i +
    # rotary_dim / 2): scores are the same.
    interleaved: bool = False
    v_norm: bool = False  # whether values get an RMSNorm without weight
    # [positions] float32: the factor on a rotated query, by its position; None: no factor.
    q_scale: torch.Tensor | None = None

    def apply(
        self, qkv: torch.Tensor, positions: torch.Tensor, spec: AttentionSpec
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Split `qkv`, then normalise and rotate, in plain torch.

        Args:
            qkv: as `Backend.store` takes it.
            positions: [T], rows of `cos_sin` and `q_scale`.

        Returns:
            Queries [T, num_heads, head_dim], keys and values [T, num_kv_heads, head_dim]; None for
            keys and values if `qkv` has only queries.
        """
        heads = qkv.view(len(qkv), -1, spec.head_dim)
        num_parts = (heads.shape[1] - spec.num_heads) // spec.num_kv_heads  # keys, values
        q, *kv = heads.split_with_sizes([spec.num_heads, *[spec.num_kv_heads] * num_parts], 1)
        cos_sin = self.cos_sin[positions]
        q = self._prepare(q, self.q_weight, cos_sin)
        if self.q_scale is not None:
            q = (q.float() * self.q_scale[positions, None, None]).to(q.dtype)
        if not kv:
            return q, None, None
        v = rms_norm(kv[-1], None, self.eps) if self.v_norm else kv[-1]
        return q, self._prepare(kv[0], self.k_weight, cos_sin), v

    def _prepare(
        self, x: torch.Tensor, weight: torch.Tensor | None, cos_sin: torch.Tensor
    ) -> torch.Tensor:
        """Normalise and rotate the heads x [T, heads, head_dim]."""
        if weight is not None and not self.after_rotation:
            x = rms_norm(x, weight, self.eps, self.kind)
        x = rotate(x, cos_sin, self.interleaved)
        if weight is not None and self.after_rotation:
            x = rms_norm(x, weight, self.eps, self.kind)
        return x
