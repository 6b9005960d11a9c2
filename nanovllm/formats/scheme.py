"""`Scheme`: how compressed-tensors stores a linear, read from a group of `config_groups`.

Checks types and ranges, and knows no tensors: each format says which schemes it takes.
"""

from typing import Any, NamedTuple

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
_ORDERS = {None: None, False: None, "weight": None, "static": None}
"""What `actorder` may be without a trace in the file. Group, or dynamic: see `Scheme.actorder`."""


class InputScheme(NamedTuple):
    """How the inputs of a linear are rounded."""

    bits: int
    type: str
    """"int" or "float"."""
    strategy: str
    """"token", "tensor", "group" or "tensor_group"."""
    dynamic: bool
    """Whether the scale is found while it runs. With "local" in the file, that of groups is."""
    symmetric: bool
    group_size: int | None


class Scheme(NamedTuple):
    """How a linear is stored."""

    format: str
    """Such as "pack-quantized"."""
    bits: int
    type: str
    """"int" or "float"."""
    strategy: str
    """"tensor", "channel", "group", "tensor_group" or "block"."""
    group_size: int | None
    """Inputs that share a scale; None without groups."""
    block: tuple[int, int] | None
    """Outputs and inputs of a block that shares a scale; None without blocks."""
    symmetric: bool
    actorder: str | None
    """"group": an input's group is not its place, `weight_g_idx` says it."""
    inputs: InputScheme | None
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
    order = _order(group["weights"].get("actorder"), where)
    inputs = _arguments(group.get("input_activations"), f"{where}: input_activations")
    block = group["weights"].get("block_structure")
    if weights.strategy == "block":
        block = _block(block, where)
    return Scheme(
        stored,
        weights.bits,
        weights.type,
        weights.strategy,
        weights.group_size,
        block if weights.strategy == "block" else None,
        weights.symmetric,
        order,
        inputs,
    )


def _arguments(arguments: Any, where: str) -> InputScheme | None:
    """Read how weights or inputs are rounded, in the fields that both have."""
    if arguments is None:
        return None
    bits, kind = read_number_type(read_object(arguments, where), where)
    size, strategy = arguments.get("group_size"), arguments.get("strategy")
    group = None if size is None else read_group_size(size, where)
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if group is None else "group"
    if strategy not in _STRATEGIES:
        raise unsupported("strategy", strategy, ", ".join(_STRATEGIES), where)
    grouped = strategy in ("group", "tensor_group")
    if grouped and group is None:
        raise CheckpointError(f"{where}: strategy {strategy} needs a group_size, is {shown(size)}")
    symmetric, dynamic = arguments.get("symmetric", True), arguments.get("dynamic", False)
    if not isinstance(symmetric, bool):
        raise CheckpointError(f"{where}: symmetric must be true or false, is {shown(symmetric)}")
    if not isinstance(dynamic, bool) and dynamic not in (None, "local"):
        raise CheckpointError(f"{where}: dynamic must be true or false, is {shown(dynamic)}")
    return InputScheme(bits, kind, strategy, bool(dynamic), symmetric, group if grouped else None)


def _order(order: Any, where: str) -> str | None:
    if isinstance(order, str | bool | None) and order in _ORDERS:
        return None
    if order in ("group", "dynamic") or order is True:
        return "group"
    raise unsupported("actorder", order, "group, weight and null", where)


def _block(block: Any, where: str) -> tuple[int, int]:
    sizes = block if isinstance(block, list) else []
    if len(sizes) != 2 or not all(type(size) is int and 0 < size <= MAX_GROUP for size in sizes):
        raise CheckpointError(
            f"{where}: block_structure must be two sizes, such as [128, 128], is {shown(block)}"
        )
    return sizes[0], sizes[1]
