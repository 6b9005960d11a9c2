"""Integers as compressed-tensors stores them: `pack-quantized` and `int-quantized`.

Layouts: compressed_tensors 0.20, compressors.pack_quantized and compressors.naive_quantized.
"""

import torch

from nanovllm.errors import UnsupportedModelError
from nanovllm.formats.fields import Field
from nanovllm.formats.scheme import Scheme
from nanovllm.formats.stored_integers import IntegerForm, StoredIntegers
from nanovllm.layers.linear import Matrix

_BITS = (4, 8)
_STRATEGIES = ("group", "channel")


def stored_packed(scheme: Scheme, matrix: Matrix, names: list[str]) -> StoredIntegers:
    """Return a weight whose integers are in words of 32 bits, along the inputs.

    Raises:
        UnsupportedModelError: the scheme is not implemented.
    """
    _check(scheme, names)
    group, bits = scheme.group_size, scheme.bits
    zeros = None
    if not scheme.symmetric:
        zeros = Field("weight_zero_point", torch.int32, group, "outputs", bits)
    form = IntegerForm(
        _label(scheme),
        bits,
        group,
        Field("weight_packed", torch.int32, 1, "inputs", bits),
        Field("weight_scale", torch.float32, group),
        zeros,
        order="weight_g_idx" if scheme.actorder == "group" else None,
        shape="weight_shape",
    )
    return StoredIntegers(matrix, form)


def stored_int(scheme: Scheme, matrix: Matrix, names: list[str]) -> StoredIntegers:
    """Return a weight with a byte for each integer.

    Raises:
        UnsupportedModelError: the scheme is not implemented.
    """
    _check(scheme, names)
    group = scheme.group_size
    zeros = None if scheme.symmetric else Field("weight_zero_point", torch.int8, group)
    form = IntegerForm(
        _label(scheme),
        scheme.bits,
        group,
        Field("weight", torch.int8),
        Field("weight_scale", torch.float32, group),
        zeros,
        order="weight_g_idx" if scheme.actorder == "group" else None,
    )
    return StoredIntegers(matrix, form)


def _label(scheme: Scheme) -> str:
    return f"compressed-tensors {scheme}"


def _check(scheme: Scheme, names: list[str]) -> None:
    """Raise unless integers of `scheme` are implemented."""
    checks = (
        ("weights: type", scheme.type, ("int",)),
        ("weights: num_bits", scheme.bits, _BITS),
        ("weights: strategy", scheme.strategy, _STRATEGIES),
        ("input_activations: type", scheme.inputs and scheme.inputs.type, (None, "int")),
    )
    for field, found, supported in checks:
        if found not in supported:
            raise UnsupportedModelError(
                f"{names[0]}: {scheme.format} with {field} {found!r} is not supported (only "
                f"{', '.join(map(repr, supported))})"
            )
