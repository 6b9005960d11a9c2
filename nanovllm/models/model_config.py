"""`ModelConfig`: a checkpoint's config.json, validated and normalised once.

A setting that would change the results but is not implemented is refused by name, never ignored.
"""

import dataclasses
from collections.abc import Collection, Mapping
from types import MappingProxyType
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
    "longrope": ("short_factor", "long_factor"),
    "proportional": (),
    "alpha": ("alpha",),
    "factors": ("factors",),
}
"""By rope type: the settings that it needs. "factors" is nanovllm's own, for GGUF files; "alpha" is
HunYuan's, whose files call it "dynamic"."""
_ROPE_NAMES = {"su": "longrope"}
"""Other names of rope types."""
_YARN_FLOATS = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
_COMMON_ROPE_KEYS = (
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "truncate",
    *_YARN_FLOATS,
)
"""Settings that any type may have; a type that does not use them ignores them."""
_FAMILY_KEYS = (
    "partial_rotary_factor",
    "llama_4_scaling_beta",
    "mrope_section",
    "mrope_interleaved",
)
"""Settings that a family reads, or that change nothing for text."""

# Far above every known model, and low enough that no product of sizes overflows.
_MAX_SIZE = 2**24
_MAX_LAYERS = 1000
_MAX_HEAD_DIM = 2**12
_ROPE_RANGE = (1e-3, 1e6)
"""Of every factor of a rope scaling. Outside it, angles are not finite."""


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "hidden_activation": ("silu", None),
    "use_sliding_window": (False, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "attention_multiplier": (None,),
    "embedding_multiplier": (1, None),
    "residual_multiplier": (1, None),
    "logits_scaling": (1, None),
    "logit_scale": (1, None),
    "output_multiplier": (1, None),
    "qk_scale_factor": (1, None),
    "query_pre_attn_scalar": (None,),
    "use_bidirectional_attention": (False, None),
    "is_causal": (True, None),
    "clip_qkv": (None,),
    "no_rope_layers": (None,),
    "num_experts": (0, None),
    "enable_moe_block": (False, None),
    "num_local_experts": (0, None),
}
"""Fields that change the arithmetic and that only some families read, with the values that ask for
nothing special. What adds weights is not here: a tensor that nobody expects is an error."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The sizes and settings that all decoder-only transformers have.

    What only one family has, its own file reads from `fields`.
    """

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
    """Of the layers with full attention, if the types of layers differ."""
    max_position: int
    """Positions that the model supports, rope scaling included."""
    tie_word_embeddings: bool
    dtype: torch.dtype
    quantization_config: Any = None
    """What config.json says of the form of the weights: `formats.registry` reads it."""
    fields: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)
    """What config.json says of the text model, with the family's defaults."""

    @classmethod
    def from_hf(
        cls,
        config: dict[str, Any],
        dtype: str = "auto",
        defaults: Mapping[str, Any] = MappingProxyType({}),
        reads: Collection[str] = (),
    ) -> "ModelConfig":
        """Read `config`, the parsed config.json of transformers 4 or 5.

        Args:
            dtype: name of a torch dtype that overrides the checkpoint's, or "auto".
            defaults: the family's values of fields that are absent.
            reads: fields beyond the common ones that the family honours.

        Raises:
            UnsupportedModelError: a setting is not implemented.
            CheckpointError: a field is missing or has an invalid value.
        """
        architecture = architecture_of(config)
        fields = {**defaults, **text_fields(config)}
        _check_supported(fields, reads)
        for key in ("attention_bias", "mlp_bias"):
            _bool(fields, key, False)
        torch_dtype = _dtype(fields, dtype)
        num_heads, num_kv_heads, head_dim = _heads(fields)
        max_position = config_size(fields, "max_position_embeddings")
        _check_rope(_rope_settings(fields, "full_attention"), reads)
        rope = _rope(fields, max_position, head_dim)
        if rope.rope_type == "yarn":
            # Users who add YaRN as Qwen3's model card says leave max_position_embeddings unscaled.
            max_position = max(max_position, int(rope.original_max_position * rope.factor))
        return cls(
            architecture=architecture,
            vocab_size=config_size(fields, "vocab_size"),
            hidden_size=config_size(fields, "hidden_size"),
            intermediate_size=config_size(fields, "intermediate_size"),
            num_layers=config_size(fields, "num_hidden_layers", high=_MAX_LAYERS),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_number(fields, "rms_norm_eps", 1e-6, 1e-30, 1.0),
            rope=rope,
            max_position=max_position,
            tie_word_embeddings=_bool(fields, "tie_word_embeddings", False),
            dtype=torch_dtype,
            fields=fields,
            quantization_config=config.get("quantization_config"),
        )

    def flag(self, key: str, default: bool = False) -> bool:
        """Return the family's own field `key`, true or false; `default` if absent."""
        value = self.fields.get(key)
        return _bool(self.fields, key, default) if value is not None else default

    def size(self, key: str, default: int | None = None) -> int:
        """Return the family's own field `key`, an integer of at least 1."""
        return config_size(self.fields, key, default)

    def number(self, key: str, default: float) -> float:
        """Return the family's own field `key`, a number above 0; `default` for null."""
        value = self.fields.get(key)
        return default if value is None else _number(self.fields, key, default, 1e-30, 1e6)

    def layer_types(self, interval: int) -> list[str]:
        """Return each layer's type, "full_attention" or "sliding_attention".

        Args:
            interval: without a list in the config, each layer whose number is a multiple of it,
                counted from 1, has full attention; 0: all have.
        """
        names = ("sliding_attention", "full_attention")
        types = self.fields.get("layer_types")
        if types is None:
            layers = range(1, self.num_layers + 1)
            return [names[not interval or number % interval == 0] for number in layers]
        unknown = {shown(name) for name in types if name not in names}
        if unknown or len(types) != self.num_layers:
            raise UnsupportedModelError(
                f"config.json: layer_types has {len(types)} layers of {self.num_layers}; types "
                f"that are not supported: {', '.join(sorted(unknown)) or 'none'}"
            )
        return list(types)

    def windows(self, interval: int) -> list[int | None]:
        """Return each layer's window in tokens; None: full attention. See `layer_types`."""
        types = self.layer_types(interval)
        if "sliding_attention" not in types or self.fields.get("sliding_window") is None:
            return [None] * len(types)
        window = self.size("sliding_window")
        return [window if name == "sliding_attention" else None for name in types]

    def rope_of(self, layer_type: str, theta: float | None = None) -> RopeConfig:
        """Return the rotary settings of layers of `layer_type`.

        Args:
            theta: the family's, where the config has none for such layers.
        """
        return _rope(self.fields, self.max_position, self.head_dim, layer_type, theta)


def text_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the text model: those of a nested text_config, if there is one.

    Of the fields around it, those count that say how the whole checkpoint is stored.
    """
    nested = config.get("text_config")
    if nested is None:
        return config
    if not isinstance(nested, dict):
        raise CheckpointError(f"config.json: text_config must be an object, is {shown(nested)}")
    outer = ("architectures", "dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")
    return {**nested, **{key: config[key] for key in outer if config.get(key) is not None}}


def architecture_of(config: dict[str, Any]) -> str:
    """Return the architecture that a parsed config.json names.

    Raises:
        CheckpointError: it does not name one.
    """
    names = config.get("architectures")
    if not (isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)):
        raise CheckpointError(f"config.json must name one architecture, has {shown(names)}")
    return names[0]


def _check_supported(fields: dict[str, Any], reads: Collection[str]) -> None:
    """Raise if a field asks for arithmetic that the family does not implement."""
    layer_types = fields.get("layer_types") or ["full_attention"]
    if not isinstance(layer_types, list) or not all(isinstance(t, str) for t in layer_types):
        raise CheckpointError(
            f"config.json: layer_types must be a list of names, is {shown(layer_types)}"
        )
    for key, neutral in _NEUTRAL.items():
        if key in fields and key not in reads and fields[key] not in neutral:
            if key == "use_sliding_window":
                break
            only = f" (only {neutral[0]})" if neutral[0] is not None else ""
            raise UnsupportedModelError(
                f"config.json: {key} {shown(fields[key])} is not supported{only}"
            )
    windows = fields.get("use_sliding_window") or set(layer_types) != {"full_attention"}
    if windows and "layer_types" not in reads:
        raise UnsupportedModelError(
            "config.json: sliding-window attention is not supported (use_sliding_window "
            f"{shown(fields.get('use_sliding_window'))}, layer_types "
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


def _rope_settings(fields: dict[str, Any], layer_type: str) -> dict[str, Any]:
    """Merge the rotary settings of transformers 5 (rope_parameters) and 4 (rope_scaling).

    rope_scaling overrides rope_parameters, as in transformers 5: model cards tell users to add it
    to config.json. original_max_position_embeddings of config.json itself overrides both. null
    means absent. rope_parameters may have one object for each type of layers.
    """
    parameters = fields.get("rope_parameters") or {}
    scaling = fields.get("rope_scaling") or {}
    by_type = isinstance(parameters, dict) and isinstance(parameters.get(layer_type), dict)
    if by_type:
        parameters = parameters[layer_type]
    if layer_type != "full_attention" and ("rope_local_base_freq" in fields or by_type):
        scaling = {}  # as in Gemma 3: it is for the layers with full attention
    given = scaling or parameters
    for found in (given, parameters):
        if not isinstance(found, dict):
            raise CheckpointError(
                f"config.json: the rope settings must be an object, are {shown(found)}"
            )
    settings = {key: value for key, value in given.items() if value is not None}
    local = (
        {"rope_theta": fields.get("rope_local_base_freq")} if layer_type != "full_attention" else {}
    )
    for fallback in (parameters, local, fields):
        for key in ("rope_theta", "partial_rotary_factor"):
            if fallback.get(key) is not None:
                settings.setdefault(key, fallback[key])
    original = "original_max_position_embeddings"
    if fields.get(original) is not None:
        settings[original] = fields[original]
    return settings


def _check_rope(settings: dict[str, Any], reads: Collection[str]) -> None:
    """Raise if a rotary setting is only for other families."""
    if settings.get("partial_rotary_factor", 1.0) == 1.0:
        reads = (*reads, "partial_rotary_factor")
    for key in _FAMILY_KEYS:
        if key in settings and key not in reads:
            raise UnsupportedModelError(f"config.json: rope settings not supported: {key!r}")


def _rope_type(settings: dict[str, Any]) -> str:
    """Take the type out of `settings`, checked."""
    other_name = settings.pop("type", "default")
    rope_type = settings.pop("rope_type", other_name)
    if rope_type == "dynamic" and settings.get("alpha") is not None:
        rope_type = "alpha"
        for key in ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
            settings.pop(key, None)  # transformers ignores them, too
    if isinstance(rope_type, str):
        rope_type = _ROPE_NAMES.get(rope_type, rope_type)
    if not isinstance(rope_type, str) or rope_type not in _ROPE_KEYS:
        raise UnsupportedModelError(
            f"config.json: rope scaling {shown(rope_type)} is not supported "
            f"({', '.join(_ROPE_KEYS)})"
        )
    for key in _ROPE_KEYS[rope_type]:
        if key not in settings:
            raise CheckpointError(f"config.json: rope scaling {rope_type!r} has no {key}")
    if unknown := settings.keys() - {*_COMMON_ROPE_KEYS, *_ROPE_KEYS[rope_type], *_FAMILY_KEYS}:
        names = shown(", ".join(sorted(unknown)))
        raise UnsupportedModelError(f"config.json: rope settings not supported: {names}")
    return rope_type


def _rope(
    fields: dict[str, Any],
    max_position: int,
    head_dim: int,
    layer_type: str = "full_attention",
    default_theta: float | None = None,
) -> RopeConfig:
    settings = _rope_settings(fields, layer_type)
    rope_type = _rope_type(settings)
    theta = _number(settings, "rope_theta", default_theta or 10000.0, 2.0, 1e12)
    original = config_size(settings, "original_max_position_embeddings", max_position)
    ratio = max_position / original if rope_type == "longrope" else 1.0
    factor = _number(settings, "factor", min(max(ratio, 1.0), _ROPE_RANGE[1]), *_ROPE_RANGE)
    partial = _number(settings, "partial_rotary_factor", 1.0, 1e-3, 1.0)
    floats = (*_YARN_FLOATS, "low_freq_factor", "high_freq_factor", "alpha")
    extra: dict[str, Any] = {
        key: _number(settings, key, 1.0, *_ROPE_RANGE) for key in floats if key in settings
    }
    if "truncate" in settings:
        extra["truncate"] = _bool(settings, "truncate", True)
    num_pairs = int(head_dim * partial) // 2
    if rope_type != "proportional" and int(head_dim * partial) % 2:
        raise UnsupportedModelError(
            f"config.json: partial_rotary_factor {partial} of head_dim {head_dim} is no even number"
        )
    for key, name in (
        ("factors", "factors"),
        ("short_factor", "factors"),
        ("long_factor", "long_factors"),
    ):
        if key in settings:
            extra[name] = _factors(settings[key], key, num_pairs)
    rope = RopeConfig(theta, rope_type, factor, original, partial=partial, **extra)
    if rope.low_freq_factor >= rope.high_freq_factor:
        raise CheckpointError(
            f"config.json: rope low_freq_factor {rope.low_freq_factor} must be below "
            f"high_freq_factor {rope.high_freq_factor}"
        )
    if rope_type == "longrope" and original < 2:
        raise CheckpointError(
            f"config.json: original_max_position_embeddings must be at least 2, is {original}"
        )
    return rope


def _factors(values: Any, key: str, num_pairs: int) -> tuple[float, ...]:
    if not isinstance(values, list) or len(values) != num_pairs:
        raise CheckpointError(
            f"config.json: rope {key} must be a list of {num_pairs} numbers, half of "
            f"what rotates of head_dim, got {shown(values)}"
        )
    name = f"config.json: a number in rope {key}"
    return tuple(check_float(CheckpointError, name, value, *_ROPE_RANGE) for value in values)
