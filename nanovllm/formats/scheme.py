"""`Scheme`: how compressed-tensors stores a linear, read from a group of `config_groups`.

Checks types and ranges, and knows no tensors: each format says which schemes it takes.
"""

import dataclasses
from typing import Any

from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.formats.settings import (
    MAX_GROUP,
    read_group_size,
    read_number_type,
    read_object,
    unsupported,
)
from nanovllm.options.validation import shown

_STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block", "token")
_GROUP_ORDERS = (True, "group", "dynamic")
"""What `actorder` may be for `Scheme.actorder` "group"."""
_OTHER_ORDERS = (None, False, "weight", "static")
"""What it may be without a trace in the tensors."""


@dataclasses.dataclass(frozen=True)
class Rounded:
    """How the inputs of a linear are rounded, or its weight."""

    bits: int
    type: str
    """"int" or "float"."""
    strategy: str
    """"tensor", "channel", "group", "tensor_group", "block" or "token"."""
    dynamic: bool
    """Whether the scale is found while it runs. With "local" in the file, that of groups is."""
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
    return Scheme(**vars(weights), format=stored, block=block, actorder=order, inputs=inputs)


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
