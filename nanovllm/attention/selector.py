"""Selects the attention backend at start: the first for its kernels that supports the model, or
the user's.
"""

import logging
from collections.abc import Iterable

import torch

from nanovllm.attention.backend import Backend
from nanovllm.attention.spec import ROUNDED_KV, AttentionSpec
from nanovllm.errors import ConfigError, UnsupportedModelError
from nanovllm.options.plugins import at_start, guarded, in_worker, load_class

logger = logging.getLogger(__name__)


def backend_class(value: str) -> type[Backend]:
    """Return the class that the option attention_backend names, "module:Class".

    Raises:
        ConfigError: there is no such class.
    """
    return load_class("attention_backend", value, Backend, ("spec",))  # type: ignore[type-abstract]


def select_backend(spec: AttentionSpec, candidates: Iterable[type[Backend]]) -> Backend:
    """Return the first of `candidates` that supports `spec`; log the reasons of those before it.

    Raises:
        UnsupportedModelError: no backend supports `spec`. The message has every reason.
        ConfigError: the same, and `spec` has a KV cache in few bits.
    """
    reasons: list[str] = []
    for backend in candidates:
        reason = backend.refusal(spec)
        if reason is None:
            logger.info("attention backend: %s%s", backend.name, "".join(f"; {r}" for r in reasons))
            return backend(spec)
        reasons.append(f"{backend.name}: {reason}")
    if spec.quantized_kv:
        asked = "fp8"
        needed = "a GPU of compute capability 8.9 and the Triton kernels"
        if spec.kv_dtype in ROUNDED_KV:
            asked = "int8" if spec.kv_dtype == torch.int8 else "int4"
            needed = "bfloat16 on a CPU and the C kernels"
        raise ConfigError(
            f'kv_cache_dtype "{asked}" needs {needed}; use "auto" ({", ".join(reasons)})'
        )
    raise UnsupportedModelError(f"no attention backend can serve this model: {'; '.join(reasons)}")


def user_backend(spec: AttentionSpec, asked: str) -> Backend:
    """Return the backend of the user's that the option attention_backend names, "module:Class".

    Raises:
        ConfigError: it cannot be made, or does not support `spec`: no other one is taken then.
    """
    name = f'attention_backend="{asked}"'
    found = backend_class(asked)
    if not isinstance(getattr(found, "name", None), str):
        raise ConfigError(f'{name} has no name: set one in the class, such as name = "mine"')
    reason = at_start(name, "unsupported()", found.refusal, spec)
    if reason is not None:
        raise ConfigError(f"{name} cannot serve this model: {reason}; leave it out")
    logger.info("attention backend: %s", asked)
    backend = at_start(name, "__init__()", found, spec)
    return guarded(backend, Backend, name, in_worker)
