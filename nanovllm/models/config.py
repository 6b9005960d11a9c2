"""A checkpoint's config.json, normalised once. What cannot be honoured is refused by name, never
ignored.
"""

import dataclasses
from typing import Any

import torch

from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.layers.quantization import Fp8Format
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
    fp8: Fp8Format | None = None
    """How the linears are kept, if in FP8."""

    @classmethod
    def from_hf(cls, config: dict[str, Any], dtype: str = "auto") -> "ModelConfig":
        """Read `config`, the parsed config.json of transformers 4 or 5.

        Args:
            dtype: a torch dtype's name that overrides the checkpoint's, or "auto".

        Raises:
            UnsupportedModelError: it asks for something that is not implemented.
            CheckpointError: a field is missing or senseless.
        """
        architectures = config.get("architectures")
        if not (
            isinstance(architectures, list)
            and len(architectures) == 1
            and isinstance(architectures[0], str)
        ):
            raise CheckpointError(f"config.json must name one architecture, has {architectures}")
        if config.get("hidden_act", "silu") != "silu":
            raise UnsupportedModelError(
                f"hidden_act {config['hidden_act']!r} is not supported (only silu)"
            )
        layer_types = config.get("layer_types") or ["full_attention"]
        if not isinstance(layer_types, list) or not all(isinstance(t, str) for t in layer_types):
            raise CheckpointError(f"config.json: layer_types must be names, is {layer_types!r}")
        if config.get("use_sliding_window") or set(layer_types) != {"full_attention"}:
            raise UnsupportedModelError(
                "sliding-window attention is not supported (use_sliding_window "
                f"{config.get('use_sliding_window')}, layer_types {sorted(set(layer_types))})"
            )
        checkpoint_dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
        name = checkpoint_dtype if dtype == "auto" else dtype
        if not isinstance(name, str) or name not in _DTYPES:
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
        rope = _rope(config, max_position)
        if rope.rope_type == "yarn":  # Qwen3's instructions add yarn and leave max_position as is
            max_position = max(max_position, int(rope.original_max_position * rope.factor))
        return cls(
            architecture=architectures[0],
            vocab_size=_positive(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_positive(config, "intermediate_size"),
            num_layers=_positive(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
            rope=rope,
            max_position=max_position,
            attention_bias=_switch(config, "attention_bias", False),
            tie_word_embeddings=_switch(config, "tie_word_embeddings", False),
            dtype=_DTYPES[name],
            fp8=_fp8(config.get("quantization_config")),
        )


def _positive(config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json: {key} must be a positive integer, is {value!r}")
    return value


def _number(config: dict[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise CheckpointError(f"config.json: {key} must be a positive number, is {value!r}")
    return float(value)


def _switch(config: dict[str, Any], key: str, default: bool) -> bool:
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: {key} must be true or false, is {value!r}")
    return value


def _rope(config: dict[str, Any], max_position: int) -> RopeConfig:
    """transformers 5 keeps all of it in rope_parameters; 4 in rope_theta and rope_scaling. Where
    both are there rope_scaling counts, as in transformers 5: model cards tell people to add it.
    """
    parameters = config.get("rope_parameters") or {}
    given = config.get("rope_scaling") or parameters
    for found in (given, parameters):
        if not isinstance(found, dict):
            raise CheckpointError(
                f"config.json: the rope settings must be an object, are {found!r}"
            )
    # null is as good as absent; what stands beside the settings counts where they lack it
    settings = {key: value for key, value in given.items() if value is not None}
    for beside in (parameters, config):
        for key in ("rope_theta", "partial_rotary_factor"):
            if beside.get(key) is not None:
                settings.setdefault(key, beside[key])
    if config.get("original_max_position_embeddings") is not None:
        settings["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    other_name = settings.pop("type", "default")
    rope_type = settings.pop("rope_type", other_name)
    if rope_type not in _ROPE_TYPES:
        raise UnsupportedModelError(
            f"rope scaling {rope_type!r} is not supported ({', '.join(_ROPE_TYPES)})"
        )
    if settings.pop("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError(
            "partial_rotary_factor is not supported: only whole heads rotate"
        )
    if rope_type != "default" and "factor" not in settings:
        raise CheckpointError(f"rope scaling {rope_type!r} has no factor")
    theta = _number(settings, "rope_theta", 10000.0)
    factor = _number(settings, "factor", 1.0)
    original = _positive(settings, "original_max_position_embeddings", max_position)
    numbers = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
    extra: dict[str, Any] = {key: _number(settings, key) for key in numbers if key in settings}
    if "truncate" in settings:
        extra["truncate"] = _switch(settings, "truncate", True)
    known = {"rope_theta", "factor", "original_max_position_embeddings", "truncate", *numbers}
    if unknown := settings.keys() - known:
        raise UnsupportedModelError(f"rope settings not supported: {', '.join(sorted(unknown))}")
    return RopeConfig(theta, rope_type, factor, original, **extra)


_BLOCK_FP8: dict[str, Any] = {
    "fmt": (None, "e4m3"),
    "activation_scheme": ("dynamic",),
    "scale_fmt": (None, "float"),
    "weight_per_tensor": (None, False),
    "act_per_tensor": (None, False),
    "dequantize": (None, False),
}
"""What is honoured of quant_method "fp8", beside its blocks and the modules it leaves out."""
_CHANNEL_FP8: dict[str, Any] = {
    "format": ("float-quantized",),
    "kv_cache_scheme": (None,),
    "sparsity_config": (None, {}),
    "transform_config": (None, {}),
    "config_groups.*.targets": (["Linear"],),
    "config_groups.*.weights.num_bits": (8,),
    "config_groups.*.weights.type": ("float",),
    "config_groups.*.weights.strategy": ("channel",),
    "config_groups.*.weights.symmetric": (None, True),
    "config_groups.*.weights.dynamic": (None, False),
    "config_groups.*.input_activations.num_bits": (8,),
    "config_groups.*.input_activations.type": ("float",),
    "config_groups.*.input_activations.strategy": ("token",),
    "config_groups.*.input_activations.dynamic": (True,),
    "config_groups.*.output_activations": (None,),
}
"""What is honoured of quant_method "compressed-tensors", with a scale for each output."""


def _fp8(given: Any) -> Fp8Format | None:
    """Read quantization_config, as Qwen's FP8 checkpoints or compressed-tensors write it.

    Inputs of FP8 layers are rounded by rows where the GPU multiplies FP8, and elsewhere not at all.
    """
    if given is None:
        return None
    if not isinstance(given, dict):
        raise CheckpointError(f"config.json: quantization_config must be an object, is {given!r}")
    method = given.get("quant_method")
    if method == "fp8":
        _check_settings(given, _BLOCK_FP8)
        block = given.get("weight_block_size")
        if not (
            isinstance(block, list)
            and len(block) == 2
            and all(type(size) is int and size > 0 for size in block)
        ):
            raise UnsupportedModelError(
                f"quantization_config: weight_block_size {block!r} is not supported (only two "
                "positive integers, such as [128, 128])"
            )
        excluded = [
            *_names(given, "modules_to_not_convert"),
            *_names(given, "ignored_layers"),
        ]
        return Fp8Format("weight_scale_inv", block[0], block[1], tuple(excluded))
    if method == "compressed-tensors":
        groups = given.get("config_groups")
        if not isinstance(groups, dict) or len(groups) != 1:
            raise UnsupportedModelError(
                f"quantization_config: config_groups {groups!r} is not supported (only one group)"
            )
        _check_settings(
            {**given, "config_groups": {"*": next(iter(groups.values()))}}, _CHANNEL_FP8
        )
        return Fp8Format("weight_scale", 1, None, tuple(_names(given, "ignore")))
    raise UnsupportedModelError(
        f"quantization_config quant_method {method!r} is not supported (only fp8 and "
        "compressed-tensors)"
    )


def _check_settings(given: dict[str, Any], known: dict[str, Any]) -> None:
    """Refuse settings, by dotted path, whose values are not among those known."""
    for path, supported in known.items():
        value: Any = given
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if value not in supported:
            raise UnsupportedModelError(
                f"quantization_config: {path.rpartition('*.')[2]} {value!r} is not supported "
                f"(only {', '.join(map(repr, supported))})"
            )


def _names(given: dict[str, Any], key: str) -> list[str]:
    names = given.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"config.json: {key} must be names, is {names!r}")
    return names
