"""The contract between the model and an attention kernel: `Backend`. spec.py has its arguments.

A backend owns the layout of the KV cache. One causal variable-length call computes a batch that
mixes prompts, chunks and single tokens.
"""

import abc
from functools import partial
from typing import Any, ClassVar

import torch

from nanovllm.attention.batch import Batch
from nanovllm.attention.spec import AttentionSpec, QKNormRope

NO_QUANTIZED_KV = "keeps keys and values in the model's dtype"
"""The reason of the backends that refuse every spec with `quantized_kv`."""
NO_VALUES_IN_KEYS = "does not take values that are a part of the keys"
"""The reason of the backends that refuse every spec with a `value_dim`."""
_ONLY_CAUSAL = "only supports causal attention"
_NO_PICTURES = (
    "lets no tokens of a picture see each other: for text alone, set "
    'limit_mm_per_prompt={"image": 0}'
)


class Backend(abc.ABC):
    """An attention kernel with its KV cache layout: it stores keys and values, then attends."""

    name: ClassVar[str]
    default_block_size: ClassVar[int]
    # Whether a CUDA graph can capture `plan` and the attention for rows of one token. In such a
    # batch `lengths` is None, the tensors keep their addresses, and a row of length 0 does nothing.
    # Several rows may be of one sequence, at consecutive positions, with the same block table: the
    # KV of the whole batch is stored before any row attends. So a graph needs no rows of several
    # tokens.
    supports_graph: ClassVar[bool] = False
    # Whether `cpu_graph.CPUGraph` can record the attention: C kernels compute all of it, and it
    # needs no plan.
    supports_recording: ClassVar[bool] = False
    # Whether no slot past a row's last token is read. If not, those of its last block must hold
    # finite numbers: see `Schedule.blocks_to_zero`.
    masks_loads: ClassVar[bool] = False
    # Whether a layer's cache may be a view whose blocks, dimension 1, are not contiguous.
    blocks_lie_apart: ClassVar[bool] = False
    sees_both_ways: ClassVar[bool] = False  # whether specs that are not `causal` are supported
    sees_pictures: ClassVar[bool] = False  # whether specs that have `sees_pictures` are supported

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.block_size = spec.block_size or self.default_block_size

    @classmethod
    @abc.abstractmethod
    def unsupported(cls, spec: AttentionSpec) -> str | None:
        """Return why this backend does not support `spec`, or None if it does."""

    @classmethod
    def refusal(cls, spec: AttentionSpec) -> str | None:
        """Return what `unsupported` does, also for a backend that has never heard of `causal` and
        `sees_pictures`.
        """
        if spec.sees_pictures and not cls.sees_pictures:
            return _NO_PICTURES
        return cls.unsupported(spec) if spec.causal or cls.sees_both_ways else _ONLY_CAUSAL

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Return the shape of a layer's KV cache: flash-attn's. Dimension 1 counts the blocks.

        If values are a part of the keys, dimension 0 has the keys alone.
        """
        spec = self.spec
        halves = 1 if spec.value_dim else 2
        return (halves, num_blocks, self.block_size, spec.num_kv_heads, spec.head_dim)

    @abc.abstractmethod
    def plan(self, batch: Batch) -> Any:
        """Return the batch's `metadata`, computed once for all layers.

        The tensors of all layers must have the same dtypes and the same alignment: a plan may keep
        the kernel that was compiled for the first layer.
        """

    def forward(
        self,
        qkv: torch.Tensor,
        norm: QKNormRope,
        kv_cache: torch.Tensor,
        batch: Batch,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store the keys and values of `qkv`, then attend with its queries.

        A token attends to its own position and all earlier ones in its window; if the spec is not
        `causal`, to all of its row. See `Batch.ends`.

        Args:
            qkv: [T, (num_heads + 2 num_kv_heads) * head_dim] contiguous, not yet normalised and
                rotated. Without the values' part, the raw keys are the values. With queries alone,
                nothing is stored: the cache is another layer's.
            sinks: [num_heads] float32, if the spec says so.

        Returns:
            [T, num_heads, output_dim].
        """
        q = self.store(qkv, norm, kv_cache, batch)
        if batch.attend is not None:
            out = self.make_output(q)
            return batch.attend(partial(self.attend, sinks=sinks), q, kv_cache, out)
        return self.attend(q, kv_cache, batch, sinks=sinks)

    def make_output(self, q: torch.Tensor) -> torch.Tensor:
        """Return a new tensor for what `attend` returns for `q`."""
        return q.new_empty(*q.shape[:2], self.spec.output_dim)

    @abc.abstractmethod
    def store(
        self, qkv: torch.Tensor, norm: QKNormRope, kv_cache: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """Normalise and rotate queries and keys, store keys and values; return the queries."""

    @abc.abstractmethod
    def attend(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: Batch,
        out: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return attention [T, num_heads, output_dim] of `q` over the cache, which holds all KV.

        Args:
            out: contiguous, for the result; None: a new tensor.
            sinks: [num_heads] float32, if the spec says so.
        """
