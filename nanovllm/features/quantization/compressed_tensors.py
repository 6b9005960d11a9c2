"""Checkpoints that compressed-tensors and llmcompressor write: which linear has which scheme.

`quantization_config` says it in `config_groups` and `ignore`: each group is a `Scheme`. Layouts of
integers: compressed_tensors 0.20, compressors.pack_quantized and compressors.naive_quantized.
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import torch

from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.features.quantization.fp4 import MXFP4, NVFP4, QuantizedFp4
from nanovllm.features.quantization.quantized_fields import Field
from nanovllm.features.quantization.quantized_fp8 import QuantizedFp8
from nanovllm.features.quantization.quantized_integers import IntegerForm, QuantizedIntegers
from nanovllm.features.quantization.settings import (
    MAX_GROUP,
    WHERE,
    Names,
    check_supported,
    one_form,
    read_group_size,
    read_names,
    read_number_type,
    read_object,
    unsupported,
)
from nanovllm.layers.linear import QuantizedWeight, WeightFormat, WeightModule
from nanovllm.options.validation import shown

_STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block", "token")
_GROUP_ORDERS = (True, "group", "dynamic")
"""What `actorder` may be for `Scheme.actorder` "group"."""
_OTHER_ORDERS = (None, False, "weight", "static")
"""What it may be without an effect on the tensors."""


@dataclasses.dataclass(frozen=True)
class Rounded:
    """How the inputs of a linear are rounded, or its weight."""

    bits: int
    type: str
    """"int" or "float"."""
    strategy: str
    """"tensor", "channel", "group", "tensor_group", "block" or "token"."""
    dynamic: bool
    """Whether the scale is computed at run time. With "local" in the file, that of groups is."""
    symmetric: bool
    group_size: int | None
    """Inputs that share a scale; None without groups."""


@dataclasses.dataclass(frozen=True)
class Scheme(Rounded):
    """How a linear is stored."""

    format: str
    """Such as "pack-quantized"."""
    block: tuple[int, int] | None = None
    """Outputs and inputs of a block that shares a scale; None without blocks."""
    actorder: str | None = None
    """"group": an input's group is not its place, `weight_g_idx` says it."""
    inputs: Rounded | None = None
    """None: they are not rounded."""

    def __str__(self) -> str:
        """Return words for the log, such as "pack-quantized W4A16 g128"."""
        inputs = self.inputs.bits if self.inputs else 16
        size = f" g{self.group_size}" if self.group_size else f" {self.strategy}"
        return f"{self.format} W{self.bits}A{inputs}{size}{'' if self.symmetric else ' asymmetric'}"


def read_scheme(group: dict[str, Any], where: str, checkpoint_format: Any) -> Scheme:
    """Read a group of `config_groups`.

    Args:
        where: the group stands, for errors.
        checkpoint_format: `format` of quantization_config, which the group's own replaces.

    Raises:
        CheckpointError: a field is missing, of the wrong type or out of range.
        UnsupportedModelError: the outputs are rounded, too, or a format has no name.
    """
    if group.get("output_activations") is not None:
        raise UnsupportedModelError(f"{where}: output_activations are not supported, only null")
    stored = group.get("format") or checkpoint_format
    if not isinstance(stored, str) or stored == "mixed-precision":
        raise UnsupportedModelError(f"{where}: format {shown(stored)} is not supported")
    weights = _arguments(group.get("weights"), f"{where}: weights")
    if weights is None:
        raise UnsupportedModelError(f"{where}: weights null is not supported: nothing is stored")
    if weights.dynamic:
        raise UnsupportedModelError(f"{where}: weights: dynamic is not supported, only false")
    order = group["weights"].get("actorder")
    if not isinstance(order, str | bool | None) or order not in _GROUP_ORDERS + _OTHER_ORDERS:
        raise unsupported("actorder", order, "group, weight and null", where)
    inputs = _arguments(group.get("input_activations"), f"{where}: input_activations")
    block = None
    if weights.strategy == "block":
        block = _block(group["weights"].get("block_structure"), where)
    order = "group" if order in _GROUP_ORDERS else None
    fields = dataclasses.asdict(weights)
    return Scheme(**fields, format=stored, block=block, actorder=order, inputs=inputs)


def _arguments(arguments: Any, where: str) -> Rounded | None:
    """Read how weights or inputs are rounded, in the fields that both have."""
    if arguments is None:
        return None
    bits, kind = read_number_type(read_object(arguments, where), where)
    size = arguments.get("group_size")
    strategy = arguments.get("strategy")
    group = None if size is None else read_group_size(size, where)
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if group is None else "group"
    if strategy not in _STRATEGIES:
        raise unsupported("strategy", strategy, ", ".join(_STRATEGIES), where)
    grouped = strategy in ("group", "tensor_group")
    if grouped and group is None:
        raise CheckpointError(f"{where}: strategy {strategy} needs a group_size, is {shown(size)}")
    symmetric = arguments.get("symmetric", True)
    dynamic = arguments.get("dynamic", False)
    if not isinstance(symmetric, bool):
        raise CheckpointError(f"{where}: symmetric must be true or false, is {shown(symmetric)}")
    if not isinstance(dynamic, bool) and dynamic not in (None, "local"):
        raise CheckpointError(f"{where}: dynamic must be true or false, is {shown(dynamic)}")
    return Rounded(bits, kind, strategy, bool(dynamic), symmetric, group if grouped else None)


def _block(block: Any, where: str) -> tuple[int, int]:
    sizes = block if isinstance(block, list) else []
    if len(sizes) != 2 or not all(type(size) is int and 0 < size <= MAX_GROUP for size in sizes):
        raise CheckpointError(
            f"{where}: block_structure must be two sizes, such as [128, 128], is {shown(block)}"
        )
    return sizes[0], sizes[1]


_MAX_GROUPS = 64
_FIXED: dict[str, tuple[Any, ...]] = {
    "quantization_status": (None, "compressed"),
    "transform_config": (None, {}),
}
"""Supported values of fields that change the layout."""
_CLASS = "Linear"
"""The target that means every linear."""

_FP4_LAYOUTS = {
    "nvfp4-pack-quantized": (NVFP4, "tensor_group"),
    "mxfp4-pack-quantized": (MXFP4, "group"),
}
"""By `Scheme.format`: the layout, and the strategy that it has."""

QuantizedScheme = Callable[[Scheme, WeightModule, list[str]], QuantizedWeight]
"""Gets a scheme, a matrix, and the linears that it merges. Returns how they are stored.

Raises UnsupportedModelError for a scheme that it does not take, and ConfigError if a rank's part
begins or ends inside what is stored together."""


def _check(
    scheme: Scheme, names: list[str], rounded: Rounded | None, **supported: Collection[Any]
) -> None:
    """Raise UnsupportedModelError unless `rounded`, of a scheme, has supported values."""
    part = "weights" if rounded is scheme else "input_activations"
    for field, values in supported.items():
        if rounded is not None and (found := getattr(rounded, field)) not in values:
            name = "num_bits" if field == "bits" else field
            raise UnsupportedModelError(
                f"{names[0]}: {scheme.format} with {part}: {name} {found!r} is not supported (only "
                f"{', '.join(map(repr, values))})"
            )


def _stored_int(scheme: Scheme, matrix: WeightModule, names: list[str]) -> QuantizedIntegers:
    """Return a weight whose integers are packed along the inputs, or have a byte each."""
    _check(scheme, names, scheme, type=("int",), bits=(4, 8), strategy=("group", "channel"))
    _check(scheme, names, scheme.inputs, type=("int",))
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
    return QuantizedIntegers(matrix, form)


def _stored_float(scheme: Scheme, matrix: WeightModule, names: list[str]) -> QuantizedFp8:
    """Return how a checkpoint of compressed-tensors stores FP8 linears."""
    blocks: dict[str, tuple[int | None, int | None]] = {
        "tensor": (None, None),
        "channel": (1, None),
        "group": (1, scheme.group_size),
        "block": scheme.block or (None, None),
    }
    _check(scheme, names, scheme, bits=(8,), type=("float",), strategy=blocks, symmetric=(True,))
    _check(scheme, names, scheme.inputs, bits=(8,), type=("float",))
    outputs, inputs = blocks[scheme.strategy]
    return QuantizedFp8(Field("weight_scale", torch.float32, inputs, outputs=outputs), matrix)


def _stored_fp4(scheme: Scheme, matrix: WeightModule, names: list[str]) -> QuantizedFp4:
    """Return how a checkpoint of compressed-tensors stores FP4 linears.

    Inputs are not rounded as `scheme.inputs` says: all kernels round less.
    """
    layout, strategy = _FP4_LAYOUTS[scheme.format]
    _check(scheme, names, scheme, bits=(4,), type=("float",), strategy=(strategy,))
    _check(scheme, names, scheme, group_size=(layout.group_size,), symmetric=(True,))
    return QuantizedFp4(layout, matrix)


def _stored_naive(scheme: Scheme, matrix: WeightModule, names: list[str]) -> QuantizedWeight:
    return (_stored_float if scheme.type == "float" else _stored_int)(scheme, matrix, names)


_STORED: dict[str, QuantizedScheme] = {
    "pack-quantized": _stored_int,
    "int-quantized": _stored_int,
    "naive-quantized": _stored_naive,
    "float-quantized": _stored_float,
    "nvfp4-pack-quantized": _stored_fp4,
    "mxfp4-pack-quantized": _stored_fp4,
}
"""By `Scheme.format`."""


class CompressedTensors(WeightFormat):
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
        if self._ignored.contains_part(name) or self._ignored.matches(name):
            return None
        for is_meant in (Names.contains, Names.matches):
            for names, _, scheme in self._groups:
                if is_meant(names, name):
                    return scheme
        return next((scheme for _, every, scheme in self._groups if every), None)

    def quantized(self, matrix: WeightModule, names: list[str]) -> QuantizedWeight | None:
        scheme = one_form(names, list(map(self.scheme, names)), "config_groups and ignore")
        return None if scheme is None else _STORED[scheme.format](scheme, matrix, names)
