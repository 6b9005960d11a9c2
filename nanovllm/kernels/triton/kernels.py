"""`Kernels` on a CUDA GPU. Imports triton: see `kernels.selector.triton_available`."""

from typing import ClassVar

import torch

from nanovllm.kernels.torch_kernels import Kernels
from nanovllm.kernels.torch_math import NORM_ROUNDED
from nanovllm.kernels.triton import decode_step, fp8, ngram, ops, sampling


class TritonKernels(Kernels):
    """Triton's, in one launch or a few where torch needs dozens."""

    name: ClassVar[str] = "triton"
    fp8 = fp8
    ngram = ngram
    greedy = staticmethod(sampling.greedy)
    sample = staticmethod(sampling.sample)
    gather = staticmethod(decode_step.gather)
    advance = staticmethod(decode_step.advance)
    accept = staticmethod(decode_step.accept)

    def add_rms_norm(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        kind: int = NORM_ROUNDED,
        multiplier: float = 1.0,
    ) -> torch.Tensor:
        if weight is None or kind != NORM_ROUNDED or multiplier != 1.0:
            return super().add_rms_norm(x, residual, weight, eps, kind, multiplier)
        return ops.add_rms_norm(x, residual, weight, eps)

    def act_and_mul(self, gate_up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
        if activation != "silu":
            return super().act_and_mul(gate_up, activation)
        return ops.silu_and_mul(gate_up)
