"""The weight method of a matrix of 4 or 8 bits on a CUDA GPU. Imports triton: see
`kernels.selector.triton_available`. Knows no format.
"""

import torch

from nanovllm.kernels.triton import int4
from nanovllm.kernels.triton.packed_ints import (
    INT8,
    IntFields,
    PackedInts,
    empty_ints,
    part_size,
    store_rows,
)
from nanovllm.kernels.triton.split_k import new_counters


def supports(weight: IntFields, dtype: torch.dtype) -> bool:
    """Return whether there are kernels for `weight`, or rows of it, and inputs of `dtype`."""
    size, groups = weight.values.shape[1], weight.scales.shape[1]
    return dtype != torch.float32 and part_size(size // groups, size) > 0


class PackedIntWeight:
    """A weight of 4 or 8 bits that stays packed in each product. A CUDA graph can hold every call.

    Args:
        num_rows: of the weight; `store` fills them.
        like: some of its rows, which it `supports`.
        dtype: of inputs and results, float16 or bfloat16.
    """

    def __init__(self, num_rows: int, like: IntFields, dtype: torch.dtype) -> None:
        self._weight, self._inputs, self._dtype = empty_ints(num_rows, like), like.inputs, dtype
        self._counters = new_counters(num_rows, like.values.device)

    @property
    def fusible(self) -> PackedInts | None:
        """The weight, if the kernels of small steps read it: fused_packed.py."""
        has_words = self._weight.kind != INT8 and self._inputs is None
        return self._weight if has_words else None

    def store(self, start: int, part: IntFields) -> None:
        """Replace the rows from `start` on by those of `part`."""
        self._weight = store_rows(self._weight, start, part)

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        x = x.contiguous() if self._inputs is None else x.index_select(1, self._inputs)
        return int4.multiply(x, self._weight, bias, self._counters)

    def embedding(self, ids: torch.Tensor) -> torch.Tensor:
        return int4.take_rows(self._weight, ids, self._inputs, self._dtype)
