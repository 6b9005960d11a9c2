"""The settings of a model in a GGUF file, as a config.json has them.

A setting that would change the results but is not implemented is refused by name. Reads no weight.
Imports no torch.
"""

from typing import Any

from nanovllm.checkpoint.gguf_family import GgufFamily
from nanovllm.checkpoint.gguf_metadata import MAX_SIZE, Metadata
from nanovllm.checkpoint.gguf_rope import rope_parameters
from nanovllm.checkpoint.gguf_vocabulary import eos_token_ids
from nanovllm.errors import CheckpointError
from nanovllm.options.validation import check_float, check_int

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
    "rope.dimension_sections",  # of pictures: a text has one position a token
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


def make_config(metadata: Metadata, family: GgufFamily) -> dict[str, Any]:
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
    head_dim = metadata.setting(
        "attention.key_length", check_int, 1, 2**12, default=config["hidden_size"] // heads
    )
    value_length = metadata.setting("attention.value_length", check_int, 0, 2**12, default=head_dim)
    if value_length != head_dim:
        rule = f"the head size, {head_dim}"
        raise metadata.unsupported("attention.value_length", value_length, rule)
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
        if metadata.own(key) is not None:
            config[name] = metadata.number(key)
    config |= family.fields(metadata, config)
    _check_unread(metadata, family)
    return config


def _size(metadata: Metadata, family: GgufFamily, key: str, default: int | None = None) -> int:
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


def _check_unread(metadata: Metadata, family: GgufFamily) -> None:
    """Raise for a setting that nobody has read and that may change the results."""
    neutral = {**_NEUTRAL, **family.neutral}
    for key in sorted(metadata.unread() - (_IGNORED_KEYS - family.neutral.keys())):
        value = metadata.own(key)
        if not any(value == allowed for allowed in neutral.get(key, ())):
            raise metadata.unsupported(key, value)
