"""The settings of a model in a GGUF file, as a config.json has them; and what its tokenizer needs.

A setting that would change the results but is not implemented is refused by name. Reads no weight.
Imports no torch.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from nanovllm.checkpoint.gguf_header import GgufHeader
from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.options.validation import check_bool, check_float, check_int, shown

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
ROPE_FACTORS = "rope_freqs.weight"
"""The tensor by whose elements the rotary angles are divided."""
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
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.attn_factor",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}
_IGNORED_KEYS = {"vocab_size", "rope.scaling.finetuned"}
"""What the tensors say too, or what changes no result."""
_NEUTRAL = {
    "attention.causal": True,
    "attention.sliding_window": 0,
    "expert_count": 0,
    "expert_used_count": 0,
    "rope.scale_linear": 1.0,
    "tensor_data_layout": "reference",
}
"""Other settings, with the value that asks for nothing special."""
_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>")
"""Tokens that end a turn wherever they are in a vocabulary, as in llama.cpp."""
_SPECIAL_TYPES = (3, 4)
"""`tokenizer.ggml.token_type` of control tokens and user-defined ones: their text is one token."""
_MAX_TOKEN_BYTES = 4 * 2**20
_MAX_SPECIAL_TOKENS = 4096


class Metadata:
    """The metadata of a file, with checked access; errors name the file and the key."""

    def __init__(self, file: Path, header: GgufHeader) -> None:
        self.file, self.tensors, self.values = file, header.tensors, header.metadata
        self.architecture = self.text("general.architecture")
        if self.architecture not in _ARCHITECTURES:
            raise UnsupportedModelError(
                f"{file}: general.architecture {shown(self.architecture)} is not supported "
                f"({', '.join(_ARCHITECTURES)})"
            )

    def text(self, key: str, default: str | None = None) -> str:
        """Return the string of key `key`."""
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise CheckpointError(f"{self.file}: {key} must be a string, is {shown(value)}")
        return value

    def setting(
        self, key: str, check: Callable[..., Any], *limits: Any, default: Any = None
    ) -> Any:
        """Return key `key` of the architecture, checked by `check`; `default` if it is absent."""
        key = f"{self.architecture}.{key}"
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        return check(CheckpointError, f"{self.file}: {key}", value, *limits)

    def settings(self) -> set[str]:
        """Return the names of the architecture's settings."""
        prefix = f"{self.architecture}."
        return {key.removeprefix(prefix) for key in self.values if key.startswith(prefix)}


def make_config(metadata: Metadata) -> dict[str, Any]:
    """Return the model's config.json; `eos_token_id` lists all tokens that end a text.

    Raises:
        CheckpointError: a setting is missing or invalid.
        UnsupportedModelError: a setting is not implemented.
    """
    _check_settings(metadata)
    file, tensors = metadata.file, metadata.tensors
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{file} has no matrix token_embd.weight")
    config: dict[str, Any] = {
        name: metadata.setting(key, check_int, 1, 2**24) for key, name in _SIZES.items()
    }
    heads = config["num_attention_heads"]
    head_dim = metadata.setting(
        "attention.key_length", check_int, 1, 2**12, default=config["hidden_size"] // heads
    )
    for key in ("attention.value_length", "rope.dimension_count"):
        if (found := metadata.setting(key, check_int, 0, 2**12, default=head_dim)) != head_dim:
            raise UnsupportedModelError(
                f"{file}: {metadata.architecture}.{key} {found} is not supported: it must be the "
                f"head size, {head_dim}"
            )
    return config | {
        "architectures": [_ARCHITECTURES[metadata.architecture]],
        "model_type": metadata.architecture,
        "dtype": "bfloat16",
        "vocab_size": embedding.shape[0],
        "num_key_value_heads": metadata.setting(
            "attention.head_count_kv", check_int, 1, heads, default=heads
        ),
        "head_dim": head_dim,
        "rms_norm_eps": metadata.setting(
            "attention.layer_norm_rms_epsilon", check_float, 1e-30, 1.0
        ),
        "rope_parameters": _rope(metadata),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "eos_token_id": _eos_token_ids(metadata, embedding.shape[0]),
    }


def _check_settings(metadata: Metadata) -> None:
    """Raise for a setting of the architecture that is not implemented."""
    for key in sorted(metadata.settings() - _CHECKED_KEYS - _IGNORED_KEYS):
        name = f"{metadata.architecture}.{key}"
        if key not in _NEUTRAL or metadata.values.get(name) != _NEUTRAL[key]:
            raise UnsupportedModelError(
                f"{metadata.file}: {name:.100} {shown(metadata.values.get(name))} is not supported"
            )


def _rope(metadata: Metadata) -> dict[str, Any]:
    """Return the rotary settings. A table of factors excludes another scaling, as in llama.cpp."""
    settings: dict[str, Any] = {
        "rope_theta": metadata.setting("rope.freq_base", check_float, 2.0, 1e12, default=10000.0)
    }
    kind = metadata.text(f"{metadata.architecture}.rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(
            f"{metadata.file}: {metadata.architecture}.rope.scaling.type {shown(kind)} is not "
            "supported (none, linear, yarn)"
        )
    if tensor := metadata.tensors.get(ROPE_FACTORS):
        if kind != "none" or tensor.type.name != "F32" or tensor.num_bytes > 2**14:
            raise UnsupportedModelError(
                f"{metadata.file}: {ROPE_FACTORS} of type {tensor.type.name}, shape "
                f"{tensor.shape} with rope scaling {kind} is not supported"
            )
        factors = np.fromfile(metadata.file, "<f4", tensor.num_bytes // 4, offset=tensor.offset)
        return settings | {"rope_type": "factors", "factors": factors.tolist()}
    if kind == "none":
        return settings
    settings |= {
        "rope_type": kind,
        "factor": metadata.setting("rope.scaling.factor", check_float, 1e-3, 1e6),
    }
    if kind == "yarn":
        names = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
        for key, name in names.items():
            if f"rope.scaling.{key}" in metadata.settings():
                settings[name] = metadata.setting(f"rope.scaling.{key}", check_float, 1e-3, 1e6)
        settings["original_max_position_embeddings"] = metadata.setting(
            "rope.scaling.original_context_length", check_int, 1, 2**24
        )
    if metadata.setting("rope.scaling.attn_factor", check_float, 0.0, default=1.0) != 1.0:
        raise UnsupportedModelError(f"{metadata.file}: a rope.scaling.attn_factor is not supported")
    return settings


def tokenizer_settings(metadata: Metadata) -> dict[str, Any]:
    """Return tokenizer.ggml's "model" and "pre"; "add_bos_token" and "add_space_prefix" if given.

    Returns {} if there are no tokens.

    Raises:
        CheckpointError: what transformers reads of the tokenizer has wrong types, or is so much
            that its work would take minutes.
    """
    tokens = metadata.values.get("tokenizer.ggml.tokens")
    if tokens is None:
        return {}
    for key, kind in (("tokens", str), ("merges", str), ("token_type", int), ("scores", float)):
        values = metadata.values.get(f"tokenizer.ggml.{key}", [])
        if not isinstance(values, list) or any(type(value) is not kind for value in values):
            raise CheckpointError(
                f"{metadata.file}: tokenizer.ggml.{key} is no list of {kind.__name__}"
            )
        if key in ("token_type", "scores") and values and len(values) != len(tokens):
            raise CheckpointError(
                f"{metadata.file}: tokenizer.ggml.{key} has {len(values)} elements for "
                f"{len(tokens)} tokens"
            )
    num_bytes = sum(map(len, tokens))
    types = metadata.values.get("tokenizer.ggml.token_type", [])
    num_special = sum(value in _SPECIAL_TYPES for value in types)
    if num_bytes > _MAX_TOKEN_BYTES or num_special > _MAX_SPECIAL_TOKENS:
        raise CheckpointError(
            f"{metadata.file}: tokenizer.ggml.tokens has {num_bytes} characters and {num_special} "
            f"special tokens; at most {_MAX_TOKEN_BYTES} and {_MAX_SPECIAL_TOKENS} are read"
        )
    metadata.text("tokenizer.chat_template", "")
    found: dict[str, Any] = {
        key: metadata.text(f"tokenizer.ggml.{key}", "") for key in ("model", "pre")
    }
    for key in ("add_bos_token", "add_space_prefix"):
        name = f"tokenizer.ggml.{key}"
        if (value := metadata.values.get(name)) is not None:
            found[key] = check_bool(CheckpointError, f"{metadata.file}: {name}", value)
    return found


def _eos_token_ids(metadata: Metadata, vocab_size: int) -> list[int]:
    """Return the tokens that end a text: those the file names, and known ends of a turn."""
    found = set()
    for key in ("eos_token_id", "eot_token_id", "eom_token_id"):
        key = f"tokenizer.ggml.{key}"
        if (token := metadata.values.get(key)) is not None:
            name = f"{metadata.file}: {key}"
            found.add(check_int(CheckpointError, name, token, 0, vocab_size - 1))
    tokens = metadata.values.get("tokenizer.ggml.tokens") or []
    types = metadata.values.get("tokenizer.ggml.token_type") or []
    numbered = enumerate(zip(tokens, types, strict=False))  # a file may have one without the other
    special = {text: index for index, (text, kind) in numbered if kind in _SPECIAL_TYPES}
    found |= {special[text] for text in _END_TOKENS if special.get(text, vocab_size) < vocab_size}
    return sorted(found)
