"""The settings of a model in a GGUF file, as a config.json has them.

A setting that would change the results but is not implemented is refused by name. Of the weights
only rotary factors are read. Imports no torch.
"""

import math
from typing import Any

import numpy as np

from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.loading.gguf_family import GgufFamily
from nanovllm.loading.gguf_header import MAX_SIZE, GGUFMetadata
from nanovllm.loading.gguf_tokenizer import eos_token_ids
from nanovllm.options.validation import check_float, check_int, check_text

_SIZES = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings",
}
"""A config's sizes, by the key of the metadata without the architecture."""
_IGNORED_KEYS = {
    "vocab_size",
    "rope.dimension_sections",  # of pictures, which only some families read
    "rope.scaling.finetuned",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_log_multiplier",
}
"""Settings that are not always read: the tensors say them too, they change no result, or they are
of some types of rotary scaling alone."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_shared_count": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_weights_scale": (0.0, 1.0),
    "rope.scale_linear": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "tensor_data_layout": ("reference",),
}
"""Other settings, with the values that ask for nothing special."""
_POOLINGS = (0, 1, 2, 3)
"""None, mean, the first token, the last."""


def make_config(metadata: GGUFMetadata, family: GgufFamily) -> dict[str, Any]:
    """Return the model's config.json; `eos_token_id` lists all tokens that end a text.

    Raises:
        CheckpointError: a setting is missing or invalid.
        UnsupportedModelError: a setting is not implemented.
    """
    file = metadata.file
    tensors = metadata.tensors
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{file} has no matrix token_embd.weight")
    config: dict[str, Any] = {name: _size(metadata, family, key) for key, name in _SIZES.items()}
    heads = config["num_attention_heads"]
    head_dim = _head_dim(metadata, family, config["hidden_size"] // heads)
    config |= {
        "architectures": [family.architecture],
        "model_type": metadata.architecture,
        "dtype": "bfloat16",
        "vocab_size": embedding.shape[0],
        "num_key_value_heads": _size(metadata, family, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": _epsilon(metadata),
        "rope_parameters": rope_parameters(metadata, head_dim, partial=family.partial_rotation),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "eos_token_id": eos_token_ids(metadata, embedding.shape[0]),
    }
    config |= {name: metadata.size(key) for key, name in family.sizes.items()}
    for key, name in family.numbers.items():
        if metadata.own(key) is not None:
            config[name] = metadata.number(key)
    config |= family.fields(metadata, config)
    if (pooling := metadata.own("pooling_type")) is not None:
        if pooling not in _POOLINGS:
            raise metadata.unsupported("pooling_type", pooling, " or ".join(map(str, _POOLINGS)))
        config["pooling_type"] = pooling
    _check_unread(metadata, family)
    return config


def _head_dim(metadata: GGUFMetadata, family: GgufFamily, default: int) -> int:
    """Return the size of a head; of latent attention, of what rotates."""
    limits = 1, 2**12
    if family.is_latent:
        rotating: int = metadata.setting("rope.dimension_count", check_int, *limits)
        return rotating
    head_dim: int = metadata.setting("attention.key_length", check_int, *limits, default=default)
    value_length = metadata.setting("attention.value_length", check_int, 0, 2**12, default=head_dim)
    if value_length != head_dim:
        rule = f"the head size, {head_dim}"
        raise metadata.unsupported("attention.value_length", value_length, rule)
    return head_dim


def _epsilon(metadata: GGUFMetadata) -> float:
    """Return the epsilon of the norms, which are RMSNorms or LayerNorms."""
    rms, layer = (f"attention.layer_norm_{kind}epsilon" for kind in ("rms_", ""))
    values = {key: metadata.own(key) for key in (rms, layer)}
    key = layer if values[rms] is None and values[layer] is not None else rms
    found: float = metadata.setting(key, check_float, 1e-30, 1.0)
    return found


def _size(metadata: GGUFMetadata, family: GgufFamily, key: str, default: int | None = None) -> int:
    """Return a size; of a list of the layers' sizes the largest."""
    value = metadata.own(key)
    if value is None and key == "feed_forward_length":  # a model may have experts alone
        value = metadata.own("expert_feed_forward_length")
    if value is None:
        value = default
    if key in family.per_layer and isinstance(value, list) and value:
        value = max(value)
    name = f"{metadata.file}: {metadata.architecture}.{key}"
    return check_int(CheckpointError, name, value, 1, MAX_SIZE)


def _check_unread(metadata: GGUFMetadata, family: GgufFamily) -> None:
    """Raise for a setting that was not read and may change the results."""
    neutral = {**_NEUTRAL, **family.neutral}
    for key in sorted(metadata.unread() - (_IGNORED_KEYS - family.neutral.keys())):
        value = metadata.own(key)
        if not any(value == allowed for allowed in neutral.get(key, ())):
            raise metadata.unsupported(key, value)


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


def rope_parameters(metadata: GGUFMetadata, head_dim: int, *, partial: bool) -> dict[str, Any]:
    """Return the rotary settings. A table of factors excludes another scaling, as in llama.cpp."""
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


def read_factors(metadata: GGUFMetadata, name: str) -> list[float]:
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


def _factor(metadata: GGUFMetadata, key: str) -> float:
    found: float = metadata.setting(f"rope.scaling.{key}", check_float, 1e-3, 1e6)
    return found


def _rotating_part(metadata: GGUFMetadata, head_dim: int, partial: bool) -> dict[str, Any]:
    """Return which share of a head rotates, if it is not all."""
    size = metadata.size("rope.dimension_count", head_dim)
    if size == head_dim:
        return {}
    if not partial or size > head_dim or size % 2:
        raise metadata.unsupported("rope.dimension_count", size, f"the head size, {head_dim}")
    share = size / head_dim
    exact = int(head_dim * share) == size
    return {"partial_rotary_factor": share if exact else math.nextafter(share, 1.0)}


def _longrope(metadata: GGUFMetadata) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": read_factors(metadata, SHORT_FACTORS),
        "long_factor": read_factors(metadata, LONG_FACTORS),
        "original_max_position_embeddings": metadata.size("rope.scaling.original_context_length"),
    }
    if metadata.own("rope.scaling.attn_factor") is not None:
        settings["attention_factor"] = _factor(metadata, "attn_factor")
    return settings
