"""How a checkpoint stores linears in FP8: `quantization_config` of config.json, normalised.

Settings that are not implemented are refused by name. Knows no tensors.
"""

import re
from typing import Any, NamedTuple

from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.options.validation import shown

_MAX_BLOCK = 1024
_MAX_EXCLUDED = 4096
_REGEX = re.compile(r"\^?(\.[*+]?|\\\.|[\w\-])*\$?", re.ASCII)
"""Regexes that are taken: names, ".", ".*" and ".+", so that a search takes no exponential time."""
_MAX_WILDCARDS = 3
_BLOCK_FP8: dict[str, Any] = {
    "fmt": (None, "e4m3"),
    "activation_scheme": ("dynamic", "static"),
    "scale_fmt": (None, "float"),
    "weight_per_tensor": (None, False),
    "act_per_tensor": (None, False),
    "dequantize": (None, False),
}
"""Supported values of quant_method "fp8", without the block size and the excluded modules."""


class Fp8Config(NamedTuple):
    """The format of a checkpoint's FP8 linears: each block of a weight has one scale."""

    scale_name: str
    """Of the tensor beside `weight` that holds a scale for each block. Its shape is
    [ceil(outputs / block_outputs), ceil(inputs / block_inputs)]."""
    block_outputs: int | None
    """None: one block spans all outputs of a checkpoint linear."""
    block_inputs: int | None
    """None: one block spans all inputs."""
    excluded: tuple[str, ...] = ()
    """Linears that are not in FP8: consecutive parts of a dotted name, or "re:" and a regex."""
    flat: bool = False
    """Whether the scales of all inputs lie in a tensor of one dimension."""

    @classmethod
    def from_blocks(cls, config: dict[str, Any]) -> "Fp8Config":
        """Read `quantization_config` as the FP8 checkpoints of Qwen and Mistral have it. Without a
        block size, a linear has one scale.

        The activation settings are checked and not kept: GPUs that multiply FP8 always round the
        inputs dynamically, other devices never round them.

        Raises:
            UnsupportedModelError: a setting is not implemented.
            CheckpointError: a field has the wrong type.
        """
        _check_settings(config, _BLOCK_FP8)
        excluded = [*_names(config, "modules_to_not_convert"), *_names(config, "ignored_layers")]
        block = config.get("weight_block_size")
        if block is None and "weight_block_size" in config:
            return cls("weight_scale_inv", None, None, tuple(excluded))
        if not (
            isinstance(block, list)
            and len(block) == 2
            and all(type(size) is int and 0 < size <= _MAX_BLOCK for size in block)
        ):
            raise UnsupportedModelError(
                f"quantization_config: weight_block_size {shown(block)} is not supported (only two "
                f"integers from 1 to {_MAX_BLOCK}, such as [128, 128], or null)"
            )
        return cls("weight_scale_inv", block[0], block[1], tuple(excluded))

    def excludes(self, name: str) -> bool:
        """Return whether the linear at dotted path `name` is not in FP8."""
        return any(
            re.match(entry[3:], name) is not None
            if entry.startswith("re:")
            else f".{entry}." in f".{name}."
            for entry in self.excluded
        )


def _check_settings(config: dict[str, Any], supported: dict[str, Any]) -> None:
    """Raise unless the value at each dotted path of `supported` is one of the values there."""
    for path, values in supported.items():
        value: Any = config
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if value not in values:
            raise UnsupportedModelError(
                f"quantization_config: {path.rpartition('*.')[2]} {shown(value)} is not supported "
                f"(only {', '.join(map(repr, values))})"
            )


def _names(config: dict[str, Any], key: str) -> list[str]:
    names = config.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"config.json: {key} must be a list of names, is {shown(names)}")
    if len(names) > _MAX_EXCLUDED:
        raise CheckpointError(
            f"config.json: {key} has {len(names)} names; at most {_MAX_EXCLUDED} are read"
        )
    for name in names:
        regex = name.removeprefix("re:")
        num_wildcards = regex.count("*") + regex.count("+")
        is_plain = _REGEX.fullmatch(regex) is not None and num_wildcards <= _MAX_WILDCARDS
        if regex != name and not is_plain:
            raise UnsupportedModelError(
                f"config.json: {key}: regex {shown(name)} is not supported (only names with up to "
                f"{_MAX_WILDCARDS} of .* and .+)"
            )
    return names
