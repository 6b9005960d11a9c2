"""`Kernels` on a CUDA GPU. Imports triton: see `platform.cuda.triton_available`."""

from typing import ClassVar

from nanovllm.kernels.torch_kernels import Kernels
from nanovllm.kernels.triton import (
    decode_step,
    experts,
    fp8,
    int4,
    lora,
    ngram,
    ops,
    sampling,
    states,
)


class TritonKernels(Kernels):
    """Triton's, in one launch or a few where torch needs dozens."""

    name: ClassVar[str] = "triton"
    fp8 = fp8
    ints = int4
    ngram = ngram
    add_rms_norm = staticmethod(ops.add_rms_norm)
    add_layer_norm = staticmethod(ops.add_layer_norm)
    rms_norm = staticmethod(ops.rms_norm)
    act_and_mul = staticmethod(ops.act_and_mul)
    mul_act = staticmethod(ops.mul_act)
    act = staticmethod(ops.act)
    route = staticmethod(experts.route)
    causal_conv = staticmethod(states.causal_conv)
    gated_delta = staticmethod(states.gated_delta)
    mamba2 = staticmethod(states.mamba2)
    gated_rms_norm = staticmethod(states.gated_rms_norm)
    greedy = staticmethod(sampling.greedy)
    sample = staticmethod(sampling.sample)
    gather = staticmethod(decode_step.gather)
    advance = staticmethod(decode_step.advance)
    accept = staticmethod(decode_step.accept)
    add_lora = staticmethod(lora.add_lora)
    experts = staticmethod(experts.experts)
