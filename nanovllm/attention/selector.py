"""Selects the attention backend at start: the first of the device's list that supports the model.

Knows no kernel: each backend says what it supports.
"""

import logging

import torch

from nanovllm.attention.backend import AttentionSpec, Backend
from nanovllm.attention.cpu import CPUBackend
from nanovllm.attention.flash_attn import FlashAttnBackend
from nanovllm.attention.torch_sdpa import TorchBackend
from nanovllm.attention.triton import TritonBackend
from nanovllm.attention.varlen import VarlenBackend
from nanovllm.errors import ConfigError, UnsupportedModelError

logger = logging.getLogger(__name__)


def select_backend(spec: AttentionSpec, *, native: bool = True) -> Backend:
    """Return the first backend that supports `spec`; log the reasons of those before it.

    Args:
        native: whether the package's own kernels may be used.

    Raises:
        UnsupportedModelError: no backend supports `spec`. The message has every reason.
        ConfigError: the same, and `spec` has an 8-bit KV cache.
    """
    backends: list[type[Backend]] = [TorchBackend]
    if native and spec.device.type == "cuda":
        backends = [FlashAttnBackend, TritonBackend, VarlenBackend, TorchBackend]
    elif native:
        backends = [CPUBackend, TorchBackend]
    reasons: list[str] = []
    for backend in backends:
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
