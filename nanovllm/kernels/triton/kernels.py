"""`Kernels` on a CUDA GPU. Imports triton: see `kernels.selector.triton_available`."""

from typing import ClassVar

import torch

from nanovllm.kernels.torch_experts import ExpertMLP, Routing
from nanovllm.kernels.torch_kernels import Kernels
from nanovllm.kernels.triton import decode_step, experts, fp8, ngram, ops, sampling


class TritonKernels(Kernels):
    """Triton's, in one launch or a few where torch needs dozens."""

    name: ClassVar[str] = "triton"
    fp8 = fp8
    ngram = ngram
    add_rms_norm = staticmethod(ops.add_rms_norm)
    rms_norm = staticmethod(ops.rms_norm)
    add = staticmethod(ops.add)
    act_and_mul = staticmethod(ops.act_and_mul)
    mul_act = staticmethod(ops.mul_act)
    relu2 = staticmethod(ops.relu2)
    scale = staticmethod(ops.scale)
    route = staticmethod(experts.route)
    greedy = staticmethod(sampling.greedy)
    sample = staticmethod(sampling.sample)
    gather = staticmethod(decode_step.gather)
    advance = staticmethod(decode_step.advance)
    accept = staticmethod(decode_step.accept)

    def experts(self, x: torch.Tensor, routing: Routing, mlp: ExpertMLP) -> torch.Tensor:
        return experts.experts(x.contiguous(), routing, mlp)
