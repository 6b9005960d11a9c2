"""`SamplingTensors`: the sampling parameters of rows, one tensor for each parameter.

A new sampling parameter is one field and its entry in `_PARAMETERS`, plus the code that uses it.
"""

import dataclasses
from array import array
from collections.abc import Callable, Sequence as Seq
from typing import NamedTuple, Self

import torch

from nanovllm.options.sampling_params import SamplingParams

KEEP_ALL = 2**31 - 1  # the top_k of a row without top_k
_MAX_TEMPERATURE = 1e30
"""Finite in float32; SamplingParams accepts every finite float64 number."""


class _Parameter(NamedTuple):
    """How a field of `SamplingTensors` is stored, and how its value is read from a request."""

    dtype: torch.dtype
    # Returns the value for a request, from its SamplingParams and its seed.
    read: Callable[[SamplingParams, int], float]


_PARAMETERS = {
    "temperatures": _Parameter(torch.float32, lambda p, seed: min(p.temperature, _MAX_TEMPERATURE)),
    "seeds": _Parameter(torch.int64, lambda p, seed: seed),
    "top_ks": _Parameter(torch.int64, lambda p, seed: min(p.top_k or KEEP_ALL, KEEP_ALL)),
    "top_ps": _Parameter(torch.float32, lambda p, seed: p.top_p),
    "min_ps": _Parameter(torch.float32, lambda p, seed: p.min_p),
}
"""The fields of `SamplingTensors`, in their order."""


@dataclasses.dataclass(frozen=True)
class SamplingTensors:
    """The sampling parameters of R rows, each parameter a tensor [R]."""

    # A row below `sampling_params.GREEDY_BELOW` is greedy, whatever its other parameters are.
    temperatures: torch.Tensor
    seeds: torch.Tensor
    top_ks: torch.Tensor  # at least 1; a top_k of vocab_size or more keeps all tokens
    top_ps: torch.Tensor  # in (0, 1]
    min_ps: torch.Tensor  # in [0, 1]

    @staticmethod
    def greedy(num_rows: int, device: torch.device) -> "SamplingTensors":
        """Return the parameters of `num_rows` greedy rows."""
        params = SamplingParams(temperature=0.0)
        return SamplingTensors(
            *(
                torch.full((num_rows,), read(params, 0), dtype=dtype, device=device)
                for dtype, read in _PARAMETERS.values()
            )
        )

    @property
    def columns(self) -> tuple[torch.Tensor, ...]:
        """The parameters' tensors, in the order of the fields."""
        return tuple(getattr(self, name) for name in _PARAMETERS)

    def take(self, rows: torch.Tensor) -> Self:
        """Return only the rows with the indices `rows` [n] int64, in that order."""
        tensors = {name: x[rows] for name, x in vars(self).items() if torch.is_tensor(x)}
        return dataclasses.replace(self, **tensors)

    def write(self, rows: torch.Tensor, packed: torch.Tensor) -> None:
        """Set the rows with the indices `rows` [n] int64 to `packed`, a result of `pack`."""
        for column, words in zip(self.columns, packed.view(len(_PARAMETERS), -1), strict=True):
            values = words.view(torch.float64) if column.is_floating_point() else words
            column[rows] = values.to(column.dtype)


def pack(params: Seq[SamplingParams], seeds: Seq[int]) -> "array[int]":
    """Return the parameters of n requests for one upload: column by column, 8 bytes a value.

    A value is an int64 or the bits of a float64.
    """
    packed = array("q")
    for dtype, read in _PARAMETERS.values():
        column = array("d" if dtype.is_floating_point else "q", map(read, params, seeds))
        packed.frombytes(column.tobytes())
    return packed
