"""Paged attention by the Triton kernels: split KV for single tokens, tiles of queries for chunks.

A row's result does not depend on the other rows of its batch.
"""

import os
from typing import TYPE_CHECKING, ClassVar

import torch

from nanovllm.attention.backend import Backend
from nanovllm.attention.batch import Batch
from nanovllm.attention.spec import ROUNDED_KV, AttentionSpec, QKNormRope

if TYPE_CHECKING:
    from nanovllm.kernels.triton.decode_attention import DecodePlan
    from nanovllm.kernels.triton.prefill_attention import PrefillPlan

_FP8_CAPABILITY = (8, 9)  # minimum compute capability for float8_e4m3fn in Triton


class PagedBackend(Backend):
    """KV cache of a layer: [2, num_blocks, block_size, num_kv_heads, head_dim], or 1 in place of 2
    where the values are a part of the keys.

    Base of the GPU backends. One Triton kernel normalises, rotates and stores.
    """

    supports_graph: ClassVar[bool] = True

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        # Imported here, because machines without a GPU may not have triton.
        from nanovllm.kernels.triton.store import store

        self._store = store

    def store(
        self, qkv: torch.Tensor, norm: QKNormRope, kv_cache: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        return self._store(
            qkv,
            positions=batch.angle_rows,
            slot_mapping=batch.slot_mapping,
            kv_cache=kv_cache,
            num_heads=self.spec.num_heads,
            **norm._asdict(),
        )


class TritonBackend(PagedBackend):
    """Takes any block size. With TRITON_INTERPRET=1 it runs on a CPU, very slowly, for tests."""

    name: ClassVar[str] = "triton"
    default_block_size: ClassVar[int] = 64
    masks_loads: ClassVar[bool] = True
    sees_pictures: ClassVar[bool] = True

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        from nanovllm.kernels.triton import decode_attention, prefill_attention
        from nanovllm.kernels.triton.online_softmax import Scores

        self._decode = decode_attention
        self._prefill = prefill_attention
        self._scores = Scores(spec.scale, spec.window, spec.softcap, spec.value_dim)

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> str | None:
        if spec.kv_dtype in ROUNDED_KV:
            return "keeps keys and values in the queries' dtype or FP8"
        if spec.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            return f"no kernel for {str(spec.dtype).removeprefix('torch.')}"
        if (reason := _values_in_keys(spec)) is not None:
            return reason
        if spec.head_dim % 8 or spec.output_dim > 512:
            return f"head_dim {spec.head_dim} is no multiple of 8 up to 512"
        if spec.output_dim > 256 and spec.dtype == torch.float32:
            return f"head_dim {spec.head_dim} in float32 takes too many registers"
        if spec.device.type == "cuda":
            capability = torch.cuda.get_device_capability(spec.device)
            if spec.quantized_kv and capability < _FP8_CAPABILITY:
                return f"compute capability {capability[0]}.{capability[1]} is below 8.9"
            return None
        interpreted = spec.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
        return None if interpreted else "needs a CUDA GPU"

    def plan(self, batch: Batch) -> "tuple[DecodePlan | None, PrefillPlan | None]":
        """Return plans for the rows of one token and of several; None where there are none."""
        spec = self.spec
        heads = spec.num_heads, spec.num_kv_heads, spec.head_dim
        decode = prefill = None
        if batch.lengths is None or 1 in batch.lengths.query_lens:
            max_seq_len = batch.block_tables.shape[1] * self.block_size
            decode = self._decode.plan_decode(
                batch.cu_seqlens_q, batch.seq_lens, max_seq_len, *heads, self._scores
            )
        if batch.lengths is not None:
            prefill = self._prefill.plan_prefill(
                *batch.lengths, *heads, spec.dtype, spec.device, self._scores
            )
        return decode, prefill

    def attend(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: Batch,
        out: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        decode, prefill = batch.metadata
        out = self.make_output(q) if out is None else out
        if decode is not None:
            self._decode.decode(q, kv_cache, batch.block_tables, decode, out, sinks)
        if prefill is not None:
            self._prefill.prefill(
                q,
                kv_cache,
                batch.block_tables,
                batch.cu_seqlens_q,
                batch.seq_lens,
                prefill,
                out,
                sinks,
                batch.ends if self.spec.sees_pictures else None,
            )
        return out


def _values_in_keys(spec: AttentionSpec) -> str | None:
    """Return why the values of `spec` cannot be a part of its keys; None if they can or are not."""
    if not spec.value_dim:
        return None
    if spec.num_kv_heads != 1:
        return "takes values that are a part of the keys only of one KV head"
    if spec.value_dim % 8 or spec.head_dim - spec.value_dim not in range(8, 129, 8):
        return f"the values are {spec.value_dim} of the keys' {spec.head_dim} numbers"
    return "keeps keys that are also values in the queries' dtype" if spec.quantized_kv else None
