"""The settings of a model in a GGUF file, as a config.json has them.

A setting that would change the results but is not implemented is refused by name. Reads no weight.
Imports no torch.
"""

from typing import Any

from nanovllm.checkpoint.gguf_family import GgufFamily
from nanovllm.checkpoint.gguf_metadata import MAX_SIZE, Metadata
from nanovllm.checkpoint.gguf_rope import ROPE_KEYS, rope_parameters
from nanovllm.checkpoint.gguf_vocabulary import eos_token_ids
from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.options.validation import check_float, check_int, shown

_SIZES = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings",
}
"""A config's sizes, by the key of the metadata without the architecture."""
_CHECKED_KEYS = {
    *_SIZES,
    *ROPE_KEYS,
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
}
_IGNORED_KEYS = {"vocab_size", "rope.scaling.finetuned"}
"""What the tensors say too, or what changes no result."""
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


def make_config(metadata: Metadata, family: GgufFamily) -> dict[str, Any]:
    """Return the model's config.json; `eos_token_id` lists all tokens that end a text.

    Raises:
        CheckpointError: a setting is missing or invalid.
        UnsupportedModelError: a setting is not implemented.
    """
    _check_settings(metadata, family)
    file, tensors = metadata.file, metadata.tensors
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{file} has no matrix token_embd.weight")
    config: dict[str, Any] = {name: _size(metadata, family, key) for key, name in _SIZES.items()}
    heads = config["num_attention_heads"]
    head_dim = metadata.setting(
        "attention.key_length", check_int, 1, 2**12, default=config["hidden_size"] // heads
    )
    value_length = metadata.setting("attention.value_length", check_int, 0, 2**12, default=head_dim)
    if value_length != head_dim:
        raise UnsupportedModelError(
            f"{file}: {metadata.architecture}.attention.value_length {value_length} is not "
            f"supported: it must be the head size, {head_dim}"
        )
    config |= {
        "architectures": [family.architecture],
        "model_type": metadata.architecture,
        "dtype": "bfloat16",
        "vocab_size": embedding.shape[0],
        "num_key_value_heads": _size(metadata, family, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": metadata.setting(
            "attention.layer_norm_rms_epsilon", check_float, 1e-30, 1.0
        ),
        "rope_parameters": rope_parameters(metadata, head_dim, partial=family.partial_rotation),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "eos_token_id": eos_token_ids(metadata, embedding.shape[0]),
    }
    config |= {name: metadata.size(key) for key, name in family.sizes.items()}
    for key, name in family.numbers.items():
        if metadata.has(key):
            config[name] = metadata.number(key)
    return config | family.fields(metadata, config)


def _size(metadata: Metadata, family: GgufFamily, key: str, default: int | None = None) -> int:
    """Return a size; of a list of the layers' sizes the largest."""
    name = f"{metadata.architecture}.{key}"
    value = metadata.values.get(name, default)
    if value is None and key == "feed_forward_length":  # a model may have experts alone
        value = metadata.values.get(f"{metadata.architecture}.expert_feed_forward_length")
    if key in family.per_layer and isinstance(value, list) and value:
        value = max(value)
    return check_int(CheckpointError, f"{metadata.file}: {name}", value, 1, MAX_SIZE)


def _check_settings(metadata: Metadata, family: GgufFamily) -> None:
    """Raise for a setting of the architecture that is not implemented."""
    own = family.keys | family.sizes.keys() | family.numbers.keys()
    known = (_CHECKED_KEYS | _IGNORED_KEYS | own) - family.neutral.keys()
    neutral = _NEUTRAL | {key: (value,) for key, value in family.neutral.items()}
    for key in sorted(metadata.settings() - known):
        name = f"{metadata.architecture}.{key}"
        value = metadata.values.get(name)
        if key not in neutral or not any(value == allowed for allowed in neutral[key]):
            raise UnsupportedModelError(
                f"{metadata.file}: {name:.100} {shown(value)} is not supported"
            )
