"""`ModelConfig`: a checkpoint's config.json, validated and normalised once.

A setting that would change the results but is not implemented is refused by name, never ignored.
"""

import dataclasses
from typing import Any, ClassVar

import torch

from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.layers.rope_scaling import RopeConfig
from nanovllm.options.validation import check_bool, check_float, check_int, shown

_DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}
_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "factors": ("factors",),
}
"""By rope type: the settings that it needs. "factors" is nanovllm's own, for GGUF files."""
_YARN_FLOATS = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
_COMMON_ROPE_KEYS = (
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "truncate",
    *_YARN_FLOATS,
)
"""Settings that any type may have; a type that does not use them ignores them."""

# Far above every known model, and low enough that no product of sizes overflows.
_MAX_SIZE = 2**24
_MAX_LAYERS = 1000
_MAX_HEAD_DIM = 2**12
_ROPE_RANGE = (1e-3, 1e6)
"""Of every factor of a rope scaling. Outside it, angles are not finite."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The sizes and settings of a decoder-only transformer."""

    module: ClassVar[str | None] = None
    """Where the class `architecture` is; None: it is a family of this folder."""
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
    """Positions that the model supports, rope scaling included."""
    attention_bias: bool
    """Whether q_proj, k_proj, v_proj and o_proj have a bias. Qwen2 does not read it."""
    mlp_bias: bool
    """Whether the linears of the MLP have a bias. Only Llama reads it."""
    tie_word_embeddings: bool
    dtype: torch.dtype
    quantization_config: Any = None
    """What config.json says of the form of the weights: `formats.registry` reads it."""

    @classmethod
    def from_hf(cls, config: dict[str, Any], dtype: str = "auto") -> "ModelConfig":
        """Read `config`, the parsed config.json of transformers 4 or 5.

        Args:
            dtype: name of a torch dtype that overrides the checkpoint's, or "auto".

        Raises:
            UnsupportedModelError: a setting is not implemented.
            CheckpointError: a field is missing or has an invalid value.
        """
        architecture = architecture_of(config)
        _check_supported(config)
        torch_dtype = _dtype(config, dtype)
        num_heads, num_kv_heads, head_dim = _heads(config)
        max_position = config_size(config, "max_position_embeddings")
        rope = _rope(config, max_position, head_dim)
        if rope.rope_type == "yarn":
            # Users who add YaRN as Qwen3's model card says leave max_position_embeddings unscaled.
            max_position = max(max_position, int(rope.original_max_position * rope.factor))
        return cls(
            architecture=architecture,
            vocab_size=config_size(config, "vocab_size"),
            hidden_size=config_size(config, "hidden_size"),
            intermediate_size=config_size(config, "intermediate_size"),
            num_layers=config_size(config, "num_hidden_layers", high=_MAX_LAYERS),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_number(config, "rms_norm_eps", 1e-6, 1e-30, 1.0),
            rope=rope,
            max_position=max_position,
            attention_bias=_bool(config, "attention_bias", False),
            mlp_bias=_bool(config, "mlp_bias", False),
            tie_word_embeddings=_bool(config, "tie_word_embeddings", False),
            dtype=torch_dtype,
            quantization_config=config.get("quantization_config"),
        )


def architecture_of(config: dict[str, Any]) -> str:
    """Return the architecture that a parsed config.json names.

    Raises:
        CheckpointError: it does not name one.
    """
    names = config.get("architectures")
    if not (isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)):
        raise CheckpointError(f"config.json must name one architecture, has {shown(names)}")
    return names[0]


def _check_supported(config: dict[str, Any]) -> None:
    """Raise if the activation or the attention pattern is not implemented."""
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(
            f"config.json: hidden_act {shown(config['hidden_act'])} is not supported (only silu)"
        )
    layer_types = config.get("layer_types") or ["full_attention"]
    if not isinstance(layer_types, list) or not all(isinstance(t, str) for t in layer_types):
        raise CheckpointError(
            f"config.json: layer_types must be a list of names, is {shown(layer_types)}"
        )
    if config.get("use_sliding_window") or set(layer_types) != {"full_attention"}:
        raise UnsupportedModelError(
            "config.json: sliding-window attention is not supported (use_sliding_window "
            f"{shown(config.get('use_sliding_window'))}, layer_types "
            f"{shown(sorted(set(layer_types)))})"
        )


def _dtype(config: dict[str, Any], override: str) -> torch.dtype:
    given = (
        override if override != "auto" else None,
        config.get("dtype"),
        config.get("torch_dtype"),
    )
    name = next((dtype for dtype in given if dtype is not None), "float32")
    if not isinstance(name, str) or name not in _DTYPES:
        raise UnsupportedModelError(f"dtype {shown(name)} is not supported ({', '.join(_DTYPES)})")
    return _DTYPES[name]


def _heads(config: dict[str, Any]) -> tuple[int, int, int]:
    """Return (query heads, KV heads, head_dim)."""
    num_heads = config_size(config, "num_attention_heads")
    num_kv_heads = config_size(config, "num_key_value_heads", num_heads)
    hidden_size = config_size(config, "hidden_size")
    head_dim = config_size(config, "head_dim", hidden_size // num_heads, high=_MAX_HEAD_DIM)
    if num_heads * head_dim > _MAX_SIZE:
        raise CheckpointError(
            f"config.json: num_attention_heads {num_heads} times head_dim {head_dim} must be at "
            f"most {_MAX_SIZE}"
        )
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads {num_heads} is no multiple of num_key_value_heads "
            f"{num_kv_heads}"
        )
    if head_dim % 2:
        raise UnsupportedModelError(f"head_dim {head_dim} is odd; rotary embedding needs halves")
    return num_heads, num_kv_heads, head_dim


def config_size(
    config: dict[str, Any], key: str, default: int | None = None, high: int = _MAX_SIZE
) -> int:
    """Return a size in a config.json; `default` for null."""
    value = config.get(key)
    value = default if value is None else value
    return check_int(CheckpointError, f"config.json: {key}", value, 1, high)


def _number(config: dict[str, Any], key: str, default: float, low: float, high: float) -> float:
    return check_float(CheckpointError, f"config.json: {key}", config.get(key, default), low, high)


def _bool(config: dict[str, Any], key: str, default: bool) -> bool:
    return check_bool(CheckpointError, f"config.json: {key}", config.get(key, default))


def _rope_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Merge the rotary settings of transformers 5 (rope_parameters) and 4 (rope_scaling).

    rope_scaling overrides rope_parameters, as in transformers 5: model cards tell users to add it
    to config.json. original_max_position_embeddings of config.json itself overrides both. null
    means absent.
    """
    parameters = config.get("rope_parameters") or {}
    given = config.get("rope_scaling") or parameters
    for found in (given, parameters):
        if not isinstance(found, dict):
            raise CheckpointError(
                f"config.json: the rope settings must be an object, are {shown(found)}"
            )
    settings = {key: value for key, value in given.items() if value is not None}
    for fallback in (parameters, config):
        for key in ("rope_theta", "partial_rotary_factor"):
            if fallback.get(key) is not None:
                settings.setdefault(key, fallback[key])
    original = "original_max_position_embeddings"
    if config.get(original) is not None:
        settings[original] = config[original]
    return settings


def _rope(config: dict[str, Any], max_position: int, head_dim: int) -> RopeConfig:
    settings = _rope_settings(config)
    other_name = settings.pop("type", "default")
    rope_type = settings.pop("rope_type", other_name)
    if not isinstance(rope_type, str) or rope_type not in _ROPE_KEYS:
        raise UnsupportedModelError(
            f"config.json: rope scaling {shown(rope_type)} is not supported "
            f"({', '.join(_ROPE_KEYS)})"
        )
    if settings.pop("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError(
            "config.json: partial_rotary_factor is not supported: only whole heads rotate"
        )
    for key in _ROPE_KEYS[rope_type]:
        if key not in settings:
            raise CheckpointError(f"config.json: rope scaling {rope_type!r} has no {key}")
    if unknown := settings.keys() - {*_COMMON_ROPE_KEYS, *_ROPE_KEYS[rope_type]}:
        names = shown(", ".join(sorted(unknown)))
        raise UnsupportedModelError(f"config.json: rope settings not supported: {names}")
    theta = _number(settings, "rope_theta", 10000.0, 2.0, 1e12)
    factor = _number(settings, "factor", 1.0, *_ROPE_RANGE)
    original = config_size(settings, "original_max_position_embeddings", max_position)
    floats = (*_YARN_FLOATS, "low_freq_factor", "high_freq_factor")
    extra: dict[str, Any] = {
        key: _number(settings, key, 1.0, *_ROPE_RANGE) for key in floats if key in settings
    }
    if "truncate" in settings:
        extra["truncate"] = _bool(settings, "truncate", True)
    if "factors" in settings:
        extra["factors"] = _factors(settings["factors"], head_dim)
    rope = RopeConfig(theta, rope_type, factor, original, **extra)
    if rope.low_freq_factor >= rope.high_freq_factor:
        raise CheckpointError(
            f"config.json: rope low_freq_factor {rope.low_freq_factor} must be below "
            f"high_freq_factor {rope.high_freq_factor}"
        )
    return rope


def _factors(values: Any, head_dim: int) -> tuple[float, ...]:
    if not isinstance(values, list) or len(values) != head_dim // 2:
        raise CheckpointError(
            f"config.json: rope factors must be a list of {head_dim // 2} numbers, half of "
            f"head_dim, got {shown(values)}"
        )
    name = "config.json: a number in rope factors"
    return tuple(check_float(CheckpointError, name, value, *_ROPE_RANGE) for value in values)
