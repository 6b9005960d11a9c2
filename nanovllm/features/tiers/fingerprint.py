"""`fingerprint`: names the engines whose KV is the same, bit for bit as far as one engine's is.

Two engines share entries only if all is equal that decides a key's bits: the network with its
weights, how it is computed, and how a page holds it. What may differ between two steps of one
engine, such as the other rows of a batch, does not count: its prefix cache does not ask either.

An adapter's digest is not part of it: one engine serves many, so it belongs in a key's root.
"""

import hashlib
import json
import os
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from nanovllm.kernels.cpu.build import processor_field, processor_flags
from nanovllm.models.model_config import ModelConfig
from nanovllm.options.config import Config

_FORMAT = 1
"""Raise it when keys or the bytes of an entry change their meaning."""
_PACKAGES = ("torch", "nanovllm", "triton", "flash-attn")
_PACKAGE = Path(__file__).parent.parent
_COMPUTING = (
    "attention",
    "checkpoint",
    "formats",
    "kernels",
    "layers",
    "lora",
    "models",
    "scheduler",
    "steps",
    "tiers",
    "worker",
)
"""The folders whose source decides what a key's bytes are: a version number stays the same while
somebody changes the code."""
_ENVIRONMENT = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR")
"""Variables that choose other kernels in torch's libraries."""


def fingerprint(
    config: Config,
    model_config: ModelConfig,
    weights: str,
    device: torch.device,
    computing: Mapping[str, Any],
) -> str:
    """Return the namespace of an engine's entries: 64 hexadecimal digits.

    Args:
        weights: digest of the weight files, see `WeightFiles`; for dummy weights, anything.
        computing: what the worker chose: kernels, attention backends, the layout of a page. Its
            values are written with `repr`, which must say the same in every process.
    """
    dummy = config.load_format == "dummy"
    decisive = {
        "format": _FORMAT,
        "weights": ("dummy", config.seed) if dummy else weights,
        "model": (type(model_config).__qualname__, vars(model_config)),
        "options": {
            "hf_overrides": config.hf_overrides,
            "quantization": config.quantization,
            "kv_cache_dtype": config.kv_cache_dtype,
            "native_kernels": config.native_kernels,
            "tensor_parallel_size": config.tensor_parallel_size,
        },
        "computing": {name: repr(value) for name, value in computing.items()},
        "device": device_kind(device),
        "versions": {name: _version(name) for name in _PACKAGES},
        "source": source_digest(),
    }
    text = json.dumps(decisive, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


def device_kind(device: torch.device) -> dict[str, Any]:
    """Return what of the machine, and of torch's settings, decides the bits of a product."""
    kind: dict[str, Any] = {
        "type": device.type,
        "byteorder": sys.byteorder,
        "precision": torch.get_float32_matmul_precision(),
        "environment": {name: os.environ.get(name) for name in _ENVIRONMENT},
    }
    if device.type == "cuda":
        kind["name"] = torch.cuda.get_device_name(device)
        kind["capability"] = torch.cuda.get_device_capability(device)
        kind["cuda"] = torch.version.cuda
        return kind
    kind["machine"] = platform.machine()
    kind["capability"] = torch.backends.cpu.get_cpu_capability()
    kind["flags"] = sorted(processor_flags())
    # torch's libraries choose blocks by the size of the processor's caches.
    kind["name"] = processor_field("model name") or platform.processor()
    return kind


def source_digest() -> str:
    """Return a digest of the source that computes KV and lays it out."""
    digest = hashlib.sha256()
    for folder in _COMPUTING:
        for file in sorted((_PACKAGE / folder).rglob("*.[pch]*")):
            if file.suffix in (".py", ".c", ".h"):
                content = file.read_bytes()
                digest.update(f"{file.relative_to(_PACKAGE)} {len(content)} ".encode())
                digest.update(content)
    return digest.hexdigest()


def _version(package: str) -> str | None:
    if package == "torch":
        return torch.__version__  # with the build, as in 2.13.0+cpu
    try:
        return version(package)
    except PackageNotFoundError:
        return None
