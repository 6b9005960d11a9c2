"""The namespace of an engine's entries in a byte store: what they depend on, in one digest."""

import dataclasses
import hashlib

import torch

from nanovllm.features.tiers.fingerprint import fingerprint
from nanovllm.features.tiers.weight_files import WeightFiles
from nanovllm.kernels.cpu.library import library_name
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.utils.distributed import broadcast_from_first, gather_to_first, tensor_parallel
from nanovllm.worker.network import Network

_ANGLE_POSITIONS = 8
"""Positions whose angles say which rope scaling is in use: LongRoPE's depends on max_model_len,
which decides nothing else."""


def kv_namespace(network: Network, weights: WeightFiles) -> str:
    """Return the namespace of the KV that `network`, which is loaded, computes: that of all ranks.

    Args:
        weights: made before the network was loaded.
    """
    attention = network.attention
    kernels = network.kernels
    device = network.device
    kind = torch.device(device.type)  # cuda:0 and cuda:1 compute alike
    specs = [dataclasses.replace(group.backend.spec, device=kind) for group in attention.groups]
    computing = {
        "kernels": type(kernels).__qualname__,
        "library": library_name() if kernels.name == "c" else None,
        "threads": torch.get_num_threads(),  # torch's libraries may cut a sum into as many parts
        "backends": [group.backend.name for group in attention.groups],
        "specs": specs,
        "block_size": network.backend.block_size,
        "layout": attention.layout,
        "states": attention.states.layout,
        "cells": attention.states.cell_tokens,
        "angles": _angles(network),
    }
    own = fingerprint(network.config, network.model_config, weights.digest(), device, computing)
    return _of_all_ranks(own, device)


def _of_all_ranks(own: str, device: torch.device) -> str:
    """Return a digest of what each rank found, in hexadecimal: a rank's KV depends on the weights
    and the machines of all of them. All ranks call it.
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
