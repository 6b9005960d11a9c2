"""`Kernels` on a CPU. Each class adds what it computes faster to that of its base."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from nanovllm.kernels.cpu import ops
from nanovllm.kernels.cpu.build import PANEL
from nanovllm.kernels.cpu.packed import OneDnnWeight, PackedWeight, use_onednn
from nanovllm.kernels.torch_kernels import HeadWeight, Kernels, LinearMethod

if TYPE_CHECKING:
    from nanovllm.kernels.torch_experts import ExpertMLP, Routing


class OneDnnKernels(Kernels):
    """Packs weights for oneDNN: for a CPU without a compiler, and models in float32 or float16."""

    def pack(self, weight: torch.Tensor, *, is_embedding: bool) -> LinearMethod | None:
        return OneDnnWeight(weight) if not is_embedding and use_onednn(weight) else None


class CSamplingKernels(OneDnnKernels):
    """Samples in C, whatever the model's dtype is."""

    name: ClassVar[str] = "c"
    greedy = staticmethod(ops.sample)
    sample = staticmethod(ops.sample)
    forbid = staticmethod(ops.forbid)


class CKernels(CSamplingKernels):
    """Computes models in bfloat16 in C."""

    add_rms_norm = staticmethod(ops.add_rms_norm)
    add_layer_norm = staticmethod(ops.add_layer_norm)
    add = staticmethod(ops.add)
    rms_norm = staticmethod(ops.rms_norm)
    act_and_mul = staticmethod(ops.act_and_mul)
    mul_act = staticmethod(ops.mul_act)
    act = staticmethod(ops.act)
    scale = staticmethod(ops.scale)

    add_lora = staticmethod(ops.add_lora)

    extend = staticmethod(ops.extend)
    causal_conv = staticmethod(ops.causal_conv)
    gated_delta = staticmethod(ops.gated_delta)
    mamba2 = staticmethod(ops.mamba2)
    gated_rms_norm = staticmethod(ops.gated_rms_norm)

    wide_linear = staticmethod(ops.wide_linear)
    route = staticmethod(ops.route)

    def experts(self, x: torch.Tensor, routing: "Routing", mlp: "ExpertMLP") -> torch.Tensor:
        if ops.supports_experts(x, mlp):
            return ops.experts(x, routing, mlp)
        return super().experts(x, routing, mlp)

    def head_linear(
        self, x: torch.Tensor, weight: HeadWeight, out: torch.Tensor, kept: int = 0
    ) -> None:
        rows = weight.rows
        if isinstance(rows, PackedWeight) and weight.rows_per_head % PANEL == 0:
            ops.head_linear(x, rows, out, kept=kept, turned=weight.turned)
        else:
            # Panels hold rows of two heads, so torch multiplies: each token alone, because its sums
            # are in another order with others.
            dense = weight.dense(x.device)
            out[:, :, :kept] = x[:, :, :kept]
            for token in range(len(x)):
                product = torch.einsum("hk,hnk->hn", x[token, :, kept:], dense)
                out[token, :, kept:] = product

    def copy(self, x: torch.Tensor, out: torch.Tensor) -> None:
        ops.copy_rows(x, out)

    def pack(self, weight: torch.Tensor, *, is_embedding: bool) -> LinearMethod | None:
        if not self.can_pack_rows(weight):
            return super().pack(weight, is_embedding=is_embedding)
        packed = PackedWeight(*weight.shape)
        packed.store(0, weight)
        return packed

    def can_pack_rows(self, weight: torch.Tensor) -> bool:
        return weight.dtype == torch.bfloat16

    def to_float(self, x: torch.Tensor) -> torch.Tensor:
        is_supported = x.dtype == torch.bfloat16 and x.is_contiguous()
        return ops.to_float(x) if is_supported else super().to_float(x)

    def store_rows(self, pool: torch.Tensor, x: torch.Tensor, rows: torch.Tensor) -> None:
        ops.copy_rows(x, pool, y_rows=rows)

    def take_rows(self, pool: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        taken = torch.empty(len(rows), pool.shape[1], dtype=pool.dtype)
        ops.copy_rows(pool, taken, x_rows=rows)
        return taken

    def join_columns(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        width = sum(part.shape[1] for part in parts)
        joined = torch.empty(len(parts[0]), width, dtype=parts[0].dtype)
        column = 0
        for part in parts:
            ops.copy_rows(part, joined[:, column : column + part.shape[1]])
            column += part.shape[1]
        return joined
