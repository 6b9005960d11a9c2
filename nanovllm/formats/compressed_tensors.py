"""Checkpoints that compressed-tensors and llmcompressor write: which linear has which scheme.

`quantization_config` says it in `config_groups` and `ignore`. Layouts of integers:
compressed_tensors 0.20, compressors.pack_quantized and compressors.naive_quantized.
"""

from collections.abc import Callable
from typing import Any

import torch

from nanovllm.errors import UnsupportedModelError
from nanovllm.formats.fields import Field
from nanovllm.formats.fp4 import stored_fp4
from nanovllm.formats.names import Names, read_names
from nanovllm.formats.scheme import Scheme, read_scheme
from nanovllm.formats.settings import WHERE, check_supported, one_form, read_object, unsupported
from nanovllm.formats.stored_fp8 import stored_float
from nanovllm.formats.stored_integers import IntegerForm, StoredIntegers
from nanovllm.layers.linear import Matrix, StoredWeight
from nanovllm.options.validation import shown

_MAX_GROUPS = 64
_FIXED: dict[str, tuple[Any, ...]] = {
    "quantization_status": (None, "compressed"),
    "transform_config": (None, {}),
}
"""Supported values of fields that change the layout."""
_CLASS = "Linear"
"""The target that means every linear."""

StoredScheme = Callable[[Scheme, Matrix, list[str]], StoredWeight]
"""Gets a scheme, a matrix, and the linears that it merges. Returns how they are stored.

Raises UnsupportedModelError for a scheme that it does not take, and ConfigError if a rank's part
begins or ends inside what is stored together."""


def _stored_int(scheme: Scheme, matrix: Matrix, names: list[str]) -> StoredIntegers:
    """Return a weight whose integers are packed along the inputs, or have a byte each."""
    rounded = scheme.inputs and scheme.inputs.type
    checks = (
        ("weights: type", scheme.type, ("int",)),
        ("weights: num_bits", scheme.bits, (4, 8)),
        ("weights: strategy", scheme.strategy, ("group", "channel")),
        ("input_activations: type", rounded, (None, "int")),
    )
    for field, found, supported in checks:
        if found not in supported:
            raise UnsupportedModelError(
                f"{names[0]}: {scheme.format} with {field} {found!r} is not supported (only "
                f"{', '.join(map(repr, supported))})"
            )
    group = scheme.group_size
    bits = scheme.bits
    shape = None
    values = Field("weight", torch.int8)
    zeros = Field("weight_zero_point", torch.int8, group)
    if scheme.format == "pack-quantized":
        values = Field("weight_packed", torch.int32, 1, "inputs", bits)
        zeros = Field("weight_zero_point", torch.int32, group, "outputs", bits)
        shape = "weight_shape"
    form = IntegerForm(
        f"compressed-tensors {scheme}",
        bits,
        group,
        values,
        Field("weight_scale", torch.float32, group),
        None if scheme.symmetric else zeros,
        order="weight_g_idx" if scheme.actorder == "group" else None,
        shape=shape,
    )
    return StoredIntegers(matrix, form)


def _stored_naive(scheme: Scheme, matrix: Matrix, names: list[str]) -> StoredWeight:
    return (stored_float if scheme.type == "float" else _stored_int)(scheme, matrix, names)


_STORED: dict[str, StoredScheme] = {
    "pack-quantized": _stored_int,
    "int-quantized": _stored_int,
    "naive-quantized": _stored_naive,
    "float-quantized": stored_float,
    "nvfp4-pack-quantized": stored_fp4,
    "mxfp4-pack-quantized": stored_fp4,
}
"""By `Scheme.format`."""


class CompressedTensors:
    """The format of a checkpoint of compressed-tensors."""

    name = "compressed-tensors"

    def __init__(self, config: dict[str, Any]) -> None:
        check_supported(config, _FIXED)
        sparsity = config.get("sparsity_config")
        if sparsity and (not isinstance(sparsity, dict) or sparsity.get("format") != "dense"):
            raise unsupported("sparsity_config", sparsity, "null")
        groups = config.get("config_groups")
        if not isinstance(groups, dict) or not 0 < len(groups) <= _MAX_GROUPS:
            raise unsupported("config_groups", groups, f"an object of 1 to {_MAX_GROUPS} groups")
        self._groups: list[tuple[Names, bool, Scheme]] = []
        for name, group in groups.items():
            where = f"{WHERE}: config_groups {shown(name)}"
            targets = read_names(read_object(group, where), "targets", where)
            scheme = read_scheme(group, where, config.get("format"))
            if scheme.format not in _STORED:
                raise unsupported("format", scheme.format, ", ".join(_STORED))
            self._groups.append((Names(targets, f"{where}: targets"), _CLASS in targets, scheme))
        self._ignored = Names(read_names(config, "ignore"), f"{WHERE}: ignore")

    def scheme(self, name: str) -> Scheme | None:
        """Return how linear `name` is stored; None: as plain numbers.

        A name counts before a regular expression, and that before the class: as in
        compressed_tensors 0.20, `utils.match.match_targets`.
        """
        if self._ignored.have_part(name) or self._ignored.match(name):
            return None
        for matches in (Names.have, Names.match):
            for names, _, scheme in self._groups:
                if matches(names, name):
                    return scheme
        return next((scheme for _, every, scheme in self._groups if every), None)

    def stored(self, matrix: Matrix, names: list[str]) -> StoredWeight | None:
        scheme = one_form(names, list(map(self.scheme, names)), "config_groups and ignore")
        return None if scheme is None else _STORED[scheme.format](scheme, matrix, names)
