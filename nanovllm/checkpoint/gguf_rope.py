"""The rotary settings in a GGUF file, as a config.json has them.

Imports no torch.
"""

import math
from typing import Any

import numpy as np

from nanovllm.checkpoint.gguf_metadata import Metadata
from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.options.validation import check_float, check_text

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor by whose elements the rotary angles are divided."""
SHORT_FACTORS = "rope_factors_short.weight"
LONG_FACTORS = "rope_factors_long.weight"
"""The same of LongRoPE, for texts of the original context and for longer ones."""
_YARN_NAMES = {
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "yarn_attn_factor": "attention_factor",
    "yarn_log_multiplier": "mscale_all_dim",
}
_MAX_FACTORS = 2**12


def rope_parameters(metadata: Metadata, head_dim: int, *, partial: bool) -> dict[str, Any]:
    """Return the rotary settings. A table of factors excludes another scaling, as in llama.cpp.

    Args:
        partial: whether the family can rotate a part of a head.
    """
    settings: dict[str, Any] = {
        "rope_theta": metadata.setting("rope.freq_base", check_float, 2.0, 1e12, default=10000.0)
    }
    settings |= _rotating_part(metadata, head_dim, partial)
    kind = metadata.setting("rope.scaling.type", check_text, default="none")
    kinds = ("none", "linear", "yarn", "longrope")
    has_long = SHORT_FACTORS in metadata.tensors or LONG_FACTORS in metadata.tensors
    if kind not in kinds or (has_long and kind not in ("none", "longrope")):
        rule = f"one of {', '.join(kinds)}"
        raise metadata.unsupported("rope.scaling.type", kind, rule)
    if ROPE_FACTORS in metadata.tensors:
        if kind != "none" or has_long:
            raise UnsupportedModelError(
                f"{metadata.file}: {ROPE_FACTORS} with rope scaling {kind} is not supported"
            )
        return settings | {"rope_type": "factors", "factors": read_factors(metadata, ROPE_FACTORS)}
    if kind == "longrope" or has_long:
        return settings | _longrope(metadata)
    if metadata.setting("rope.scaling.attn_factor", check_float, 0.0, default=1.0) != 1.0:
        raise UnsupportedModelError(f"{metadata.file}: a rope.scaling.attn_factor is not supported")
    if kind == "none":
        return settings
    settings |= {"rope_type": kind, "factor": _factor(metadata, "factor")}
    if kind == "yarn":
        for key, name in _YARN_NAMES.items():
            if metadata.own(f"rope.scaling.{key}") is not None:
                settings[name] = _factor(metadata, key)
        if "mscale_all_dim" in settings:
            settings["mscale"] = 1.0
        settings["original_max_position_embeddings"] = metadata.size(
            "rope.scaling.original_context_length"
        )
    return settings


def read_factors(metadata: Metadata, name: str) -> list[float]:
    """Return the elements of the small tensor `name`."""
    tensor = metadata.tensors.get(name)
    if tensor is None:
        raise CheckpointError(f"{metadata.file} has no tensor {name}")
    if tensor.type.name != "F32" or len(tensor.shape) > 1 or tensor.shape[0] > _MAX_FACTORS:
        raise UnsupportedModelError(
            f"{metadata.file}: {name} of type {tensor.type.name}, shape {tensor.shape} is not "
            f"supported: it must be F32 with one dimension of at most {_MAX_FACTORS}"
        )
    factors = np.fromfile(metadata.file, "<f4", tensor.shape[0], offset=tensor.offset)
    found: list[float] = factors.tolist()
    return found


def _factor(metadata: Metadata, key: str) -> float:
    found: float = metadata.setting(f"rope.scaling.{key}", check_float, 1e-3, 1e6)
    return found


def _rotating_part(metadata: Metadata, head_dim: int, partial: bool) -> dict[str, Any]:
    """Return which share of a head rotates, if it is not all."""
    size = metadata.size("rope.dimension_count", head_dim)
    if size == head_dim:
        return {}
    if not partial or size > head_dim or size % 2:
        raise metadata.unsupported("rope.dimension_count", size, f"the head size, {head_dim}")
    share = size / head_dim
    exact = int(head_dim * share) == size
    return {"partial_rotary_factor": share if exact else math.nextafter(share, 1.0)}


def _longrope(metadata: Metadata) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": read_factors(metadata, SHORT_FACTORS),
        "long_factor": read_factors(metadata, LONG_FACTORS),
        "original_max_position_embeddings": metadata.size("rope.scaling.original_context_length"),
    }
    if metadata.own("rope.scaling.attn_factor") is not None:
        settings["attention_factor"] = _factor(metadata, "attn_factor")
    return settings
