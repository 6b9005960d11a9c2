"""Checkpoints that AutoAWQ writes with its kernel GEMM: 4 bits, packed along the outputs.

`qweight` [in, out / 8] int32, `qzeros` [groups, out / 8] int32, `scales` [groups, out]. The eight
numbers of a word are in a special order. Layout: compressed_tensors 0.20, AutoAWQConverter.
"""

from typing import Any

import torch

from nanovllm.features.quantization.names import Names, read_names
from nanovllm.features.quantization.quantized_fields import Field
from nanovllm.features.quantization.quantized_integers import IntegerForm, QuantizedIntegers
from nanovllm.features.quantization.settings import (
    WHERE,
    check_supported,
    one_form,
    read_group_size,
    unsupported,
)
from nanovllm.layers.linear import WeightFormat, WeightModule

_BITS = 4
_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the 4 bits of each of eight neighbours are: the first in place 0, the next in 4."""
_EXCLUDED = "modules_to_not_convert"
_FIXED: dict[str, tuple[Any, ...]] = {
    "version": (None, "gemm", "GEMM"),
    "zero_point": (None, True),
    "lm_head": (None, False, True),
}
"""Supported values of fields that change the layout."""


class Awq(WeightFormat):
    """The format of an AWQ checkpoint."""

    name = "AWQ"

    def __init__(self, config: dict[str, Any]) -> None:
        check_supported(config, _FIXED)
        bits = config.get("bits", config.get("w_bit"))
        if type(bits) is not int or bits != _BITS:
            raise unsupported("bits", bits, str(_BITS))
        group = read_group_size(config.get("group_size", config.get("q_group_size", 128)))
        self._excluded = Names(read_names(config, _EXCLUDED), f"{WHERE}: {_EXCLUDED}")
        self._form = IntegerForm(
            f"AWQ W4A16 {'channel' if group is None else f'g{group}'}",
            _BITS,
            group,
            _packed("qweight", 1),
            Field("scales", torch.float32, group, transposed=True),
            _packed("qzeros", group),
        )

    def quantized(self, matrix: WeightModule, names: list[str]) -> QuantizedIntegers | None:
        forms = [None if self._excluded.contains_text_of(name) else self._form for name in names]
        form = one_form(names, forms, _EXCLUDED)
        return None if form is None else QuantizedIntegers(matrix, form)


def _packed(suffix: str, group: int | None) -> Field:
    return Field(suffix, torch.int32, group, "outputs", _BITS, _ORDER, transposed=True)
