"""Checkpoints that AutoAWQ writes with its kernel GEMM: 4 bits, packed along the outputs.

`qweight` [in, out / 8] int32, `qzeros` [groups, out / 8] int32, `scales` [groups, out]. The eight
numbers of a word are in an order of their own. Layout: compressed_tensors 0.20, AutoAWQConverter.
"""

from typing import Any

import torch

from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.formats.fields import Field
from nanovllm.formats.names import Names, listed, read_names
from nanovllm.formats.packing import AWQ_ORDER
from nanovllm.formats.stored_integers import IntegerForm, StoredIntegers
from nanovllm.layers.linear import Matrix
from nanovllm.options.validation import shown

_WHERE = "quantization_config"
_MAX_GROUP = 2**20
_BITS = 4
_FIXED: dict[str, tuple[Any, ...]] = {
    "version": (None, "gemm", "GEMM"),
    "zero_point": (None, True),
    "lm_head": (None, False),
}
"""Supported values of fields that change the layout."""


class Awq:
    """The format of an AWQ checkpoint.

    Args:
        config: `quantization_config`.

    Raises:
        UnsupportedModelError: a setting is not implemented.
        CheckpointError: a field has the wrong type.
    """

    name = "AWQ"

    def __init__(self, config: dict[str, Any]) -> None:
        for key, values in _FIXED.items():
            if (value := config.get(key)) not in values:
                raise UnsupportedModelError(
                    f"{_WHERE}: {key} {shown(value)} is not supported (only "
                    f"{', '.join(map(repr, values))})"
                )
        bits = config.get("bits", config.get("w_bit"))
        if type(bits) is not int or bits != _BITS:
            raise UnsupportedModelError(f"{_WHERE}: bits {shown(bits)} is not supported (only 4)")
        size = config.get("group_size", config.get("q_group_size", 128))
        if type(size) is not int or size == 0 or not -1 <= size <= _MAX_GROUP:
            raise CheckpointError(
                f"{_WHERE}: group_size must be from 1 to {_MAX_GROUP}, or -1, is {shown(size)}"
            )
        key = "modules_to_not_convert"
        self._excluded = Names(read_names(config, key), f"{_WHERE}: {key}")
        group = None if size == -1 else size
        self._form = IntegerForm(
            f"AWQ W4A16 {'channel' if group is None else f'g{group}'}",
            _BITS,
            group,
            _packed("qweight", 1),
            Field("scales", torch.float32, group, transposed=True),
            _packed("qzeros", group),
        )

    def stored(self, matrix: Matrix, names: list[str]) -> StoredIntegers | None:
        """Return how the checkpoint stores the linears `names`, which `matrix` merges.

        Raises:
            UnsupportedModelError: only some of them are in AWQ.
        """
        excluded = [self._excluded.are_within(name) for name in names]
        if all(excluded):
            return None
        if any(excluded):
            raise UnsupportedModelError(
                f"{listed(names)} are computed as one, so modules_to_not_convert must have all "
                "or none of them"
            )
        return StoredIntegers(matrix, self._form)


def _packed(suffix: str, group: int | None) -> Field:
    return Field(suffix, torch.int32, group, "outputs", _BITS, AWQ_ORDER, transposed=True)
