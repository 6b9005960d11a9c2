"""The namespace of an engine's entries in a byte store: what they depend on, in one digest.

Two engines share entries only if all is equal that decides a key's bits: the network with its
weights, how it is computed, and how a page holds it. What may differ between two steps of one
engine, such as the other rows of a batch, does not count: its prefix cache does not ask either.

An adapter's digest is not part of it: one engine serves many, so it belongs in a key's root.
"""

import dataclasses
import hashlib
import importlib
import json
import os
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import nanovllm
from nanovllm.features.tiers.weight_files import WeightSnapshot
from nanovllm.kernels.cpu.library import library_name
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models.model_config import ModelConfig
from nanovllm.options.config import Config
from nanovllm.options.plugins import is_plugin
from nanovllm.platform import Platform
from nanovllm.utils.distributed import broadcast_from_first, gather_to_first, tensor_parallel
from nanovllm.worker.network import Network

_FORMAT = 1  # raise it when keys or the bytes of an entry change their meaning
_PACKAGES = ("torch", "nanovllm-engine", "triton", "flash-attn")
_PACKAGE = Path(nanovllm.__file__).parent
_COMPUTING = (
    "attention",
    "core",
    "features",
    "kernels",
    "kv",
    "layers",
    "loading",
    "models",
    "platform",
    "scheduler",
    "utils",
    "worker",
)
"""The folders whose source decides what a key's bytes are: a version number stays the same while
somebody changes the code."""
_ENVIRONMENT = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR")
"""Variables that choose other kernels in torch's libraries."""
_ANGLE_POSITIONS = 8
"""Positions whose angles say which rope scaling is in use: LongRoPE's depends on max_model_len,
which decides nothing else."""


def kv_namespace(network: Network, weights: WeightSnapshot) -> str:
    """Return the namespace of the KV that `network`, which is loaded, computes: that of all ranks.
    `weights` were found before.
    """
    attention = network.attention
    kernels = network.kernels
    device = network.device
    # cuda:0 and cuda:1 compute alike.
    like = torch.device(device.type)
    specs = [dataclasses.replace(group.backend.spec, device=like) for group in attention.groups]
    computing = {
        "kernels": type(kernels).__qualname__,
        "library": library_name() if kernels.name == "c" else None,
        "threads": torch.get_num_threads(),  # torch's libraries may cut a sum into as many parts
        "backends": [group.backend.name for group in attention.groups],
        "specs": specs,
        "block_size": network.backend.block_size,
        "layout": attention.layout,
        "states": attention.states.layout,
        "angles": _angles(network),
    }
    kind = device_kind(network.platform)
    own = fingerprint(network.config, network.model_config, weights.digest(), kind, computing)
    return _of_all_ranks(own, device)


def _of_all_ranks(own: str, device: torch.device) -> str:
    """Return a digest of what each rank found: a rank's KV depends on the weights and the machines
    of all of them, which call this.
    """
    if tensor_parallel().size == 1:
        return own
    found = torch.tensor(list(bytes.fromhex(own)), device=device)
    gathered = gather_to_first(found)
    if gathered is not None:
        digest = hashlib.sha256(bytes(gathered.tolist())).digest()
        found = torch.tensor(list(digest), device=device)
    return bytes(broadcast_from_first(found).tolist()).hex()


def _angles(network: Network) -> list[list[float]]:
    return [
        module.cos_sin[:_ANGLE_POSITIONS].flatten().tolist()
        for module in network.model.modules()
        if isinstance(module, RotaryEmbedding)
    ]


def fingerprint(
    config: Config,
    model_config: ModelConfig,
    weights: str,
    device: Mapping[str, Any],
    computing: Mapping[str, Any],
) -> str:
    """Return the namespace of an engine's entries: 64 hexadecimal digits.

    Args:
        weights: digest of the weight files, see `WeightSnapshot`; for dummy weights, anything.
        device: what `device_kind` returns.
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
        "device": device,
        "versions": {name: _version(name) for name in _PACKAGES},
        "source": source_digest(),
        "plugins": _plugins_digest(config, model_config),
    }
    text = json.dumps(decisive, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


def device_kind(platform: Platform) -> dict[str, Any]:
    """Return what of the machine, and of torch's settings, decides the bits of a product."""
    return {
        "type": type(platform).__qualname__,
        "byteorder": sys.byteorder,
        "precision": torch.get_float32_matmul_precision(),
        "environment": {name: os.environ.get(name) for name in _ENVIRONMENT},
        **platform.fingerprint(),
    }


def source_digest() -> str:
    """Return a digest of the source that computes KV and lays it out."""
    digest = hashlib.sha256()
    for folder in _COMPUTING:
        files = sorted((_PACKAGE / folder).rglob("*.[pch]*"))
        assert files, folder
        for file in files:
            if file.suffix in (".py", ".c", ".h"):
                content = file.read_bytes()
                digest.update(f"{file.relative_to(_PACKAGE)} {len(content)} ".encode())
                digest.update(content)
    return digest.hexdigest()


def _plugins_digest(config: Config, model_config: ModelConfig) -> list[str]:
    """Return each class of the user's that decides bits, and the digests of their files."""
    values = [config.attention_backend, config.quantization, config.step_runner]
    classes = [value for value in values if value is not None and is_plugin(value)]
    modules = [value.partition(":")[0] for value in classes]
    modules += [model_config.module] if model_config.module else []
    files = [importlib.import_module(name).__file__ for name in modules]
    digests = [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files if file]
    return classes + digests


def _version(package: str) -> str | None:
    if package == "torch":
        return torch.__version__  # with the build, as in 2.13.0+cpu
    try:
        return version(package)
    except PackageNotFoundError:
        return None
