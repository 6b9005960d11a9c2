"""Selects the attention backend at start: the first of the device's list that supports the model.

Knows no kernel: each backend says what it supports.
"""

import logging

import torch

from nanovllm.attention.backend import Backend
from nanovllm.attention.cpu import CPUBackend
from nanovllm.attention.flash_attn import FlashAttnBackend
from nanovllm.attention.spec import AttentionSpec
from nanovllm.attention.torch_explicit import TorchExplicitBackend
from nanovllm.attention.torch_sdpa import TorchBackend
from nanovllm.attention.triton import TritonBackend
from nanovllm.errors import ConfigError, UnsupportedModelError
from nanovllm.kernels.torch_kernels import Kernels

logger = logging.getLogger(__name__)

BACKENDS: dict[str, tuple[type[Backend], ...]] = {
    "torch": (TorchBackend, TorchExplicitBackend),
    "c": (CPUBackend, TorchBackend, TorchExplicitBackend),
    "triton": (FlashAttnBackend, TritonBackend, TorchBackend, TorchExplicitBackend),
}
"""By the name of the kernels that run beside them: the best first."""


def select_backend(spec: AttentionSpec, kernels: Kernels) -> Backend:
    """Return the first backend beside `kernels` that supports `spec`; log the reasons of those
    before it.

    Raises:
        UnsupportedModelError: no backend supports `spec`. The message has every reason.
        ConfigError: the same, and `spec` has an 8-bit KV cache.
    """
    reasons: list[str] = []
    for backend in BACKENDS[kernels.name]:
        reason = backend.unsupported(spec)
        if reason is None:
            logger.info("attention backend: %s%s", backend.name, "".join(f"; {r}" for r in reasons))
            return backend(spec)
        reasons.append(f"{backend.name}: {reason}")
    if spec.quantized_kv:
        asked, needed = "fp8", "a GPU of compute capability 8.9 and the Triton kernels"
        if spec.kv_dtype == torch.int8:
            asked, needed = "int8", "bfloat16 on a CPU and the C kernels"
        raise ConfigError(
            f'kv_cache_dtype "{asked}" needs {needed}; use "auto" ({", ".join(reasons)})'
        )
    raise UnsupportedModelError(f"no attention backend can serve this model: {'; '.join(reasons)}")
