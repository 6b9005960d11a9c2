"""Fields of a config.json, checked one by one, and its rotary settings in all their forms."""

from collections.abc import Collection
from typing import Any

from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.layers.rotary_embedding import RopeConfig
from nanovllm.options.validation import check_bool, check_float, check_int, shown, unsupported

MAX_SIZE = 2**24
"""Far above every known model, and low enough that no product of sizes overflows."""


_BY_TYPE = {
    ("BailingMoeV3ForCausalLM", "bailing_hybrid"): "BailingHybridForCausalLM",
    ("Mistral3ForConditionalGeneration", "mistral4"): "Mistral4ForCausalLM",
}
"""The architectures of text models, by the one that config.json names and the text model's own
model_type: of those that do not follow from the first alone."""


def text_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the text model: those of a nested text_config, if there is one.

    Of the outer fields, only those that say how the whole checkpoint is stored are added.
    """
    nested = config.get("text_config")
    if nested is None:
        return config
    if not isinstance(nested, dict):
        raise CheckpointError(f"config.json: text_config must be an object, is {shown(nested)}")
    outer = ("architectures", "dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")
    return {**nested, **{key: config[key] for key in outer if config.get(key) is not None}}


def architecture_of(config: dict[str, Any]) -> str:
    """Return the architecture that a parsed config.json names, or that of its text model.

    Raises:
        CheckpointError: it does not name one.
    """
    names = config.get("architectures")
    if not (isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)):
        raise CheckpointError(f"config.json must name one architecture, has {shown(names)}")
    nested = config.get("text_config")
    kind = (nested if isinstance(nested, dict) else config).get("model_type")
    return _BY_TYPE.get((names[0], str(kind)), names[0])


def check_one_label(config: dict[str, Any]) -> None:
    """Raise UnsupportedModelError if a model has several labels, and no one score."""
    labels = config.get("id2label")
    number = len(labels) if isinstance(labels, dict) else config.get("num_labels", 2)
    if number != 1:
        raise UnsupportedModelError(
            f"config.json: {shown(number)} labels (id2label, num_labels) are not supported (only "
            "one label, which is the score of a cross-encoder): a classifier is not a reranker, "
            "as in vLLM's /score and sentence-transformers' rank"
        )


def config_size(
    config: dict[str, Any],
    key: str,
    default: int | None = None,
    high: int = MAX_SIZE,
    low: int = 1,
) -> int:
    """Return a size in a config.json, from `low` to `high`; `default` for null."""
    value = config.get(key)
    value = default if value is None else value
    return check_int(CheckpointError, f"config.json: {key}", value, low, high)


def config_number(
    config: dict[str, Any], key: str, default: float, low: float, high: float
) -> float:
    """Return a number from `low` to `high` in a config.json; `default` if it is absent."""
    return check_float(CheckpointError, f"config.json: {key}", config.get(key, default), low, high)


def config_bool(config: dict[str, Any], key: str, default: bool) -> bool:
    """Return a field that is true or false in a config.json; `default` if it is absent."""
    return check_bool(CheckpointError, f"config.json: {key}", config.get(key, default))


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
"""The settings that each rope type needs. "factors" is nanovllm's, for GGUF files; "alpha" is
HunYuan's, whose files call it "dynamic"."""
_YARN_FLOATS = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
_COMMON_ROPE_KEYS = (
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "max_position_embeddings",
    "truncate",
    *_YARN_FLOATS,
)
"""Settings that any type may have; a type that does not use them ignores them."""
FAMILY_KEYS = (
    "partial_rotary_factor",
    "llama_4_scaling_beta",
    "mrope_section",
    "mrope_interleaved",
)
"""Settings that a family reads, or that change nothing for text."""
_ROPE_RANGE = (1e-3, 1e6)
"""Range of every factor of a rope scaling. Outside it, angles are not finite."""


def rope_settings(fields: dict[str, Any], layer_type: str) -> dict[str, Any]:
    """Merge the rotary settings of transformers 5 (rope_parameters) and 4 (rope_scaling).

    rope_scaling overrides rope_parameters, as in transformers 5: model cards tell users to add it
    to config.json. original_max_position_embeddings of config.json itself overrides both. null
    means absent. rope_parameters may have one object for each layer type.
    """
    keys = ("rope_parameters", "rope_scaling")
    parameters, scaling = ({} if fields.get(key) is None else fields[key] for key in keys)
    by_type = isinstance(parameters, dict) and any(isinstance(p, dict) for p in parameters.values())
    if by_type:
        if not isinstance(parameters.get(layer_type), dict):
            raise CheckpointError(
                f"config.json: rope_parameters must have an object for {layer_type}, are "
                f"{shown(parameters)}"
            )
        parameters = parameters[layer_type]
    local: dict[str, Any] = {}
    if layer_type != "full_attention":
        scaling = {}  # in Gemma 3 and Olmo 3 it is only for layers with full attention
        local = {"rope_theta": fields.get("rope_local_base_freq")}
    given = scaling or parameters
    for found in (scaling, parameters):
        if not isinstance(found, dict):
            raise CheckpointError(
                f"config.json: the rope settings must be an object, are {shown(found)}"
            )
    settings = {key: value for key, value in given.items() if value is not None}
    for key in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        if settings.get(key) == 0 and settings[key] is not False:
            del settings[key]  # 0 counts as absent, as in transformers
    # As in transformers: next to rope_scaling, config.json's own fields come before
    # rope_parameters, but after those of the layer type.
    neox = {
        "rope_theta": fields.get("rotary_emb_base"),
        "partial_rotary_factor": fields.get("rotary_pct"),
    }
    order = (parameters, local, fields) if by_type else (local, fields, parameters)
    for fallback in (*order, neox):
        for key in ("rope_theta", "partial_rotary_factor"):
            if fallback.get(key) is not None:
                settings.setdefault(key, fallback[key])
    if fields.get("rotary_dim") is not None:  # MiniMax-M2's
        head_dim = config_size(fields, "head_dim", config_size(fields, "rotary_dim"))
        rotary_dim = config_size(fields, "rotary_dim", high=head_dim)
        settings.setdefault("partial_rotary_factor", rotary_dim / head_dim)
    original = "original_max_position_embeddings"
    if fields.get(original) is not None:
        settings[original] = fields[original]
    return settings


def check_rope(fields: dict[str, Any], reads: Collection[str]) -> None:
    """Raise if a rotary setting is only for other families."""
    settings = rope_settings(fields, "full_attention")
    parameters = fields.get("rope_parameters")
    parameters = parameters if isinstance(parameters, dict) else {}
    by_type = [name for name, value in parameters.items() if isinstance(value, dict)]
    if by_type and "rope_parameters" not in reads:
        raise UnsupportedModelError(
            f"config.json: rope_parameters for {shown(by_type[0])} alone are not supported: this "
            "family rotates all layers alike"
        )
    if settings.get("partial_rotary_factor", 1.0) == 1.0:
        reads = (*reads, "partial_rotary_factor")
    for key in FAMILY_KEYS:
        if key in settings and key not in reads:
            raise UnsupportedModelError(f"config.json: rope settings not supported: {key!r}")


def _rope_type(settings: dict[str, Any]) -> str:
    """Take the type out of `settings`, checked."""
    other_name = settings.pop("type", "default")
    rope_type = settings.pop("rope_type", other_name)
    if rope_type == "dynamic" and settings.get("alpha") is not None:
        rope_type = "alpha"
        for key in ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
            settings.pop(key, None)  # transformers also ignores them
    if rope_type == "mrope" and "mrope_section" in settings:  # which only some families read
        rope_type = "default"
    if rope_type == "su":  # its first name
        rope_type = "longrope"
    if not isinstance(rope_type, str) or rope_type not in _ROPE_KEYS:
        raise unsupported("config.json: rope scaling", rope_type, ", ".join(_ROPE_KEYS))
    for key in _ROPE_KEYS[rope_type]:
        if key not in settings:
            raise CheckpointError(f"config.json: rope scaling {rope_type!r} has no {key}")
    if unknown := settings.keys() - {*_COMMON_ROPE_KEYS, *_ROPE_KEYS[rope_type], *FAMILY_KEYS}:
        names = shown(", ".join(sorted(unknown)))
        raise UnsupportedModelError(
            f"config.json: rope settings not supported: {names} with rope_type {rope_type}"
        )
    return rope_type


def read_rope(
    fields: dict[str, Any],
    max_position: int,
    head_dim: int,
    layer_type: str = "full_attention",
) -> RopeConfig:
    """Return the checked rotary settings of layers of `layer_type`."""
    settings = rope_settings(fields, layer_type)
    rope_type = _rope_type(settings)
    theta = config_number({**fields, **settings}, "rope_theta", 10_000.0, 2.0, 1e12)
    original = config_size(settings, "original_max_position_embeddings", max_position)
    ratio = max_position / original if rope_type == "longrope" else 1.0
    factor = config_number(settings, "factor", min(max(ratio, 1.0), _ROPE_RANGE[1]), *_ROPE_RANGE)
    partial = config_number(settings, "partial_rotary_factor", 1.0, 1e-3, 1.0)
    floats = (*_YARN_FLOATS, "low_freq_factor", "high_freq_factor", "alpha")
    extra: dict[str, Any] = {
        key: config_number(settings, key, 1.0, *_ROPE_RANGE) for key in floats if key in settings
    }
    if "truncate" in settings:
        extra["truncate"] = config_bool(settings, "truncate", True)
    extra["query_growth"] = config_number(settings, "llama_4_scaling_beta", 0.0, 0.0, 1e6)
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
            f"config.json: rope {key} must be a list of {num_pairs} numbers, half of what "
            f"partial_rotary_factor leaves of head_dim, got {shown(values)}"
        )
    name = f"config.json: a number in rope {key}"
    return tuple(check_float(CheckpointError, name, value, *_ROPE_RANGE) for value in values)
