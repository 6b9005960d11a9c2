"""`ModelConfig`: a checkpoint's config.json, validated and normalised once.

A setting that would change the results but is not implemented is refused by name, never ignored.
"""

import dataclasses
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch

from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.layers.rotary_embedding import RopeConfig
from nanovllm.models.config_fields import (
    MAX_SIZE,
    architecture_of,
    check_rope,
    config_bool,
    config_number,
    config_size,
    read_rope,
    text_fields,
)
from nanovllm.options.validation import check_float, shown, unsupported

_DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}
_LAYER_TYPES = {"attention": "full_attention", "mamba": "linear_attention"}
"""Names of transformers 4."""
_MAX_LAYERS = 1000
_MAX_HEAD_DIM = 2**12
ONLY_SOME_READ: dict[str, tuple[Any, ...]] = {
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
    "use_bidirectional_attention": (False, None, "vision"),  # "vision": for images only
    "is_causal": (True, None),
    "clip_qkv": (None,),
    "no_rope_layers": (None,),
    "num_experts": (0, None),
    "enable_moe_block": (False, None),
    "swiglu_limit": (7.0, None),
    "swiglu_alpha": (1.702, None),
    "num_local_experts": (0, None),
    "attn_output_gate": (False, None),
    "rope_local_base_freq": (None,),
    "add_cross_attention": (False, None),
}
"""Fields that change the arithmetic and that only some families read, with the values that ask for
nothing special. Fields that add weights are not listed: an unexpected tensor is an error."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The sizes and settings that all decoder-only transformers have.

    A family's file reads anything else from `fields`.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig  # if the types of layers differ, that of the layers with full attention
    max_position: int  # positions that the model supports, rope scaling included
    tie_word_embeddings: bool
    dtype: torch.dtype
    has_label: bool = False  # whether the head gives one score and not the logits of tokens
    # What config.json says about the form of the weights: `formats.weight_formats` reads it.
    quantization_config: Any = None
    # Module of the class `architecture`. None is that of a family of this folder.
    module: str | None = None
    # The fields of the text model in config.json, with the family's defaults.
    fields: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)
    # What config.json calls a field, by its common name.
    names: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: _Names(), repr=False, compare=False
    )

    @classmethod
    def from_hf(
        cls,
        config: dict[str, Any],
        dtype: str = "auto",
        defaults: Mapping[str, Any] = MappingProxyType({}),
        reads: Collection[str] = (),
        aliases: Mapping[str, str] = MappingProxyType({}),
        ignores: Collection[str] = (),
    ) -> "ModelConfig":
        """Read `config`, the parsed config.json of transformers 4 or 5.

        Args:
            dtype: name of a torch dtype that overrides the checkpoint's, or "auto".
            defaults: the family's values of fields that are absent.
            reads: fields beyond the common ones that the family honours.
            aliases: the family's names for common fields, which take precedence.
            ignores: fields that count as absent.

        Raises:
            UnsupportedModelError: a setting is not implemented.
            CheckpointError: a field is missing or has an invalid value.
        """
        architecture = architecture_of(config)
        given = text_fields(config)
        fields = {**defaults, **{key: given[key] for key in given if key not in ignores}}
        name = _Names({key: own for key, own in aliases.items() if fields.get(own) is not None})
        _set_layer_types(fields, name["layer_types"])
        _check_supported(fields, reads)
        for key in ("attention_bias", "mlp_bias"):
            config_bool(fields, key, False)
        torch_dtype = _dtype(fields, dtype)
        num_heads, num_kv_heads, head_dim = _heads(fields, name)
        max_position = config_size(fields, name["max_position_embeddings"])
        check_rope(fields, reads)
        rope = read_rope(fields, max_position, head_dim)
        if rope.rope_type == "yarn":
            # Qwen3's model card tells users to add YaRN but leaves max_position_embeddings as is.
            max_position = max(max_position, int(rope.original_max_position * rope.factor))
        hidden_size = config_size(fields, name["hidden_size"])
        # Without GPT-2's n_inner, its MLP is four times as wide as the hidden states.
        size = 4 * hidden_size if aliases.get("intermediate_size") == "n_inner" else None
        return cls(
            architecture=architecture,
            vocab_size=config_size(fields, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=config_size(fields, name["intermediate_size"], size),
            num_layers=config_size(fields, name["num_hidden_layers"], high=_MAX_LAYERS),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=config_number(fields, name["rms_norm_eps"], 1e-6, 1e-30, 1.0),
            rope=rope,
            max_position=max_position,
            tie_word_embeddings=config_bool(fields, name["tie_word_embeddings"], False),
            dtype=torch_dtype,
            fields=fields,
            names=name,
            quantization_config=config.get("quantization_config"),
        )

    def flag(self, key: str, default: bool = False) -> bool:
        """Return the family's own field `key`, true or false; `default` if absent."""
        key = self.names[key]
        null = key in self.fields and self.fields[key] is None
        return False if null else config_bool(self.fields, key, default)

    def size(self, key: str, default: int | None = None, high: int = MAX_SIZE, low: int = 1) -> int:
        """Return the family's own field `key`, an integer from `low` to `high`."""
        return config_size(self.fields, self.names[key], default, high, low)

    def number(self, key: str, default: float) -> float:
        """Return the family's own field `key`, a number above 0; `default` for null."""
        key = self.names[key]
        value = self.fields.get(key)
        return default if value is None else config_number(self.fields, key, default, 1e-30, 1e6)

    def count(self, key: str) -> int:
        """Return the family's own field `key`, an integer of at least 0; 0 for null."""
        return self.size(key, 0, low=0)

    def numbers(self, key: str) -> list[int]:
        """Return the family's own field `key`, a list of layers' numbers; [] if absent."""
        values = self.fields.get(key)
        values = [] if values is None else values
        if not isinstance(values, list) or {*map(type, values)} - {int}:
            raise CheckpointError(
                f"config.json: {key} must be a list of numbers, is {shown(values)}"
            )
        return values

    def per_layer(self, key: str) -> list[float] | None:
        """Return the family's own field `key`, a number for each layer; None if absent."""
        values = self.fields.get(key)
        if values is None:
            return None
        if not isinstance(values, list) or len(values) < self.num_layers:
            raise CheckpointError(
                f"config.json: {key} must have a number for each of num_hidden_layers "
                f"{self.num_layers}, is {shown(values)}"
            )
        name = f"config.json: a number in {key}"
        return [check_float(CheckpointError, name, value, 0.0, 1e12) for value in values]

    def only(self, key: str, *values: Any) -> None:
        """Check that the family's own field `key` is absent, null, or one of `values`."""
        value = self.fields.get(key)
        if value is not None and value not in values:
            raise unsupported(f"config.json: {key}", value, ", ".join(map(str, values)))

    def window(self) -> int | None:
        """Return the window of every layer in tokens; None if the config has none."""
        return None if self.fields.get("sliding_window") is None else self.size("sliding_window")

    def layer_types(self, interval: int, other: str = "sliding_attention") -> list[str]:
        """Return each layer's type, "full_attention" or `other`.

        Args:
            interval: without a list in the config, every layer whose number, counted from 1, is a
                multiple of this has full attention; 0: all have.
        """
        names = (other, "full_attention")
        layers = range(1, self.num_layers + 1)
        default = [names[not interval or number % interval == 0] for number in layers]
        return self.layer_types_of(names, default)

    def layer_types_of(self, names: Collection[str], default: list[str]) -> list[str]:
        """Return each layer's type, one of `names`; `default` without a list in the config."""
        types = self.fields.get("layer_types")
        if types is None:
            return default
        unknown = {shown(name) for name in types if name not in names}
        if unknown or len(types) != self.num_layers:
            raise UnsupportedModelError(
                f"config.json: layer_types has {len(types)} layers of num_hidden_layers "
                f"{self.num_layers}; types that are not supported: "
                f"{', '.join(sorted(unknown)) or 'none'}"
            )
        return list(types)

    def windows(self, interval: int) -> list[int | None]:
        """Return each layer's window in tokens; None: full attention. See `layer_types`."""
        types = self.layer_types(interval)
        window = self.window() if "sliding_attention" in types else None
        return [window if name == "sliding_attention" else None for name in types]

    def rope_of(self, layer_type: str) -> RopeConfig:
        """Return the rotary settings of layers of `layer_type`."""
        original = config_size(self.fields, self.names["max_position_embeddings"])
        return read_rope(self.fields, original, self.head_dim, layer_type)


def _set_layer_types(fields: dict[str, Any], key: str) -> None:
    """Set layer_types to those in field `key`, under the names of transformers 5; None if there is
    no list. Without num_hidden_layers, set it to their number.
    """
    types = fields.get(key)
    if types is not None:
        if not isinstance(types, list) or not all(isinstance(name, str) for name in types):
            raise CheckpointError(f"config.json: {key} must be a list of names, is {shown(types)}")
        types = [_LAYER_TYPES.get(name) or name for name in types]
        if fields.get("num_hidden_layers") is None:
            fields["num_hidden_layers"] = len(types)
    fields["layer_types"] = types


def _check_supported(fields: dict[str, Any], reads: Collection[str]) -> None:
    """Raise if a field asks for arithmetic that the family does not implement."""
    layer_types = fields["layer_types"] or ["full_attention"]
    for key, neutral in ONLY_SOME_READ.items():
        if key in fields and key not in reads and fields[key] not in neutral:
            if key == "use_sliding_window":
                continue
            only = f" (only {neutral[0]})" if neutral[0] is not None else ""
            raise UnsupportedModelError(
                f"config.json: {key} {shown(fields[key])} is not supported{only}"
            )
    windows = fields.get("use_sliding_window") or {*layer_types} - {"full_attention"}
    if windows and "layer_types" not in reads:
        raise UnsupportedModelError(
            "config.json: sliding-window attention is not supported (use_sliding_window "
            f"{shown(fields.get('use_sliding_window'))}, layer_types "
            f"{shown(sorted(set(layer_types)))})"
        )


def _dtype(config: dict[str, Any], override: str) -> torch.dtype:
    asked = None if override == "auto" else override
    given = (asked, config.get("dtype"), config.get("torch_dtype"))
    name = next((dtype for dtype in given if dtype is not None), "float32")
    if not isinstance(name, str) or name not in _DTYPES:
        raise UnsupportedModelError(f"dtype {shown(name)} is not supported ({', '.join(_DTYPES)})")
    return _DTYPES[name]


class _Names(dict[str, str]):
    """What a config.json calls the common fields: as here, but for those in the dictionary."""

    def __missing__(self, key: str) -> str:
        return key


def _heads(config: dict[str, Any], name: Mapping[str, str]) -> tuple[int, int, int]:
    """Return (query heads, KV heads, head_dim)."""
    num_heads = config_size(config, name["num_attention_heads"])
    num_kv_heads = config_size(config, "num_key_value_heads", num_heads)
    hidden_size = config_size(config, name["hidden_size"])
    head_dim = config_size(config, name["head_dim"], hidden_size // num_heads, high=_MAX_HEAD_DIM)
    if num_heads * head_dim > MAX_SIZE:
        raise CheckpointError(
            f"config.json: num_attention_heads {num_heads} times head_dim {head_dim} must be at "
            f"most {MAX_SIZE}"
        )
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads {num_heads} is no multiple of num_key_value_heads "
            f"{num_kv_heads}"
        )
    if head_dim % 2:
        raise UnsupportedModelError(
            f"config.json: {name['head_dim']} {head_dim} is odd ({name['num_attention_heads']} "
            f"{num_heads}); rotary embedding needs halves"
        )
    return num_heads, num_kv_heads, head_dim
