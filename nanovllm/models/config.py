"""A checkpoint's config.json, normalised once. What cannot be honoured is refused by name, never
ignored.
"""

import dataclasses
from typing import Any

import torch

from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.layers.rotary_embedding import RopeConfig

_DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}
_ROPE_TYPES = ("default", "linear", "yarn")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer's dimensions and switches."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position: int
    """Positions the model was made for, its rope scaling included."""
    attention_bias: bool
    tie_word_embeddings: bool
    dtype: torch.dtype

    @classmethod
    def from_hf(cls, config: dict[str, Any], dtype: str = "auto") -> "ModelConfig":
        """Read `config`, the parsed config.json of transformers 4 or 5.

        Args:
            dtype: a torch dtype's name that overrides the checkpoint's, or "auto".

        Raises:
            UnsupportedModelError: it asks for something that is not implemented.
            CheckpointError: a field is missing or senseless.
        """
        architectures = config.get("architectures") or []
        if len(architectures) != 1:
            raise CheckpointError(f"config.json must name one architecture, has {architectures}")
        for key, wanted in (("hidden_act", "silu"), ("quantization_config", None)):
            if config.get(key, wanted) != wanted:
                raise UnsupportedModelError(
                    f"{key} {config[key]!r} is not supported (only {wanted})"
                )
        layer_types = set(config.get("layer_types") or ["full_attention"])
        if config.get("use_sliding_window") or layer_types != {"full_attention"}:
            raise UnsupportedModelError(
                f"sliding-window attention is not supported (layer_types {sorted(layer_types)})"
            )
        checkpoint_dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
        name = checkpoint_dtype if dtype == "auto" else dtype
        if name not in _DTYPES:
            raise UnsupportedModelError(f"dtype {name!r} is not supported ({', '.join(_DTYPES)})")

        num_heads = _positive(config, "num_attention_heads")
        num_kv_heads = _positive(config, "num_key_value_heads", num_heads)
        hidden_size = _positive(config, "hidden_size")
        head_dim = _positive(config, "head_dim", hidden_size // num_heads)
        if num_heads % num_kv_heads:
            raise CheckpointError(
                f"num_attention_heads {num_heads} is no multiple of "
                f"num_key_value_heads {num_kv_heads}"
            )
        if head_dim % 2:
            raise UnsupportedModelError(
                f"head_dim {head_dim} is odd; rotary embedding needs halves"
            )
        max_position = _positive(config, "max_position_embeddings")
        return cls(
            architecture=architectures[0],
            vocab_size=_positive(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_positive(config, "intermediate_size"),
            num_layers=_positive(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=_rope(config, max_position),
            max_position=max_position,
            attention_bias=bool(config.get("attention_bias", False)),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            dtype=_DTYPES[name],
        )


def _positive(config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json: {key} must be a positive integer, is {value!r}")
    return value


def _rope(config: dict[str, Any], max_position: int) -> RopeConfig:
    """transformers 5 keeps all of it in rope_parameters; 4 in rope_theta and rope_scaling."""
    settings = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = settings.pop("rope_theta", None) or config.get("rope_theta", 10000.0)
    rope_type = settings.pop("rope_type", None) or settings.pop("type", None) or "default"
    settings.pop("type", None)
    if rope_type not in _ROPE_TYPES:
        raise UnsupportedModelError(
            f"rope scaling {rope_type!r} is not supported ({', '.join(_ROPE_TYPES)})"
        )
    if settings.pop("partial_rotary_factor", config.get("partial_rotary_factor")) not in (
        None,
        1.0,
    ):
        raise UnsupportedModelError(
            "partial_rotary_factor is not supported: only whole heads rotate"
        )
    original = settings.pop("original_max_position_embeddings", None) or max_position
    factor = settings.pop("factor", None)
    if rope_type != "default" and factor is None:
        raise CheckpointError(f"rope scaling {rope_type!r} has no factor")
    known = {"beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"}
    if unknown := settings.keys() - known:
        raise UnsupportedModelError(f"rope settings not supported: {', '.join(sorted(unknown))}")
    given = {key: value for key, value in settings.items() if value is not None}
    return RopeConfig(float(theta), rope_type, float(factor or 1.0), original, **given)
