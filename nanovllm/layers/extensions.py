"""What another folder may say of a matrix: `formats` does."""

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch

from nanovllm.checkpoint.shards import Shard
from nanovllm.kernels.torch_kernels import Kernels, WeightMethod


class StoredWeight(Protocol):
    """The weight [n, k] of a matrix while it is loaded, if not as numbers of the model's dtype.

    The matrix's own weight is on torch's meta device: this object owns all memory.
    """

    @property
    def label(self) -> str:
        """Name the form, for the report on a checkpoint: "GPTQ W4A16 g128"."""
        ...

    @property
    def description(self) -> str:
        """Say what the weight became, for the log: "in FP8, kept in 8 bits". Valid after
        `method`.
        """
        ...

    def shards(self, weight: Shard) -> Iterator[Shard]:
        """Yield the checkpoint tensors that stand in place of `weight`, a part of the matrix.

        It is called several times for each part, and for models on torch's meta device: it
        allocates what it loads into once, and then on the device of the matrix.

        Args:
            weight: named "<linear>.weight"; that of all experts has no suffix, and an `index`.
                `shape` is that of the whole linear's weight, `dim` and `start` say which part
                this rank has. `target` is a view of the matrix on the meta device: its first row
                is row `target.storage_offset() // k` of the matrix.

        Raises:
            ConfigError: this rank's part begins or ends inside a group of numbers.
            UnsupportedModelError: the form does not exist for such a weight.
        """
        ...

    def method(self, dtype: torch.dtype, kernels: Kernels) -> WeightMethod:
        """Return what multiplies, made of what was loaded; release what is not needed any more.

        Dummy weights fill integers with zeros: such tensors must be valid, too.

        Args:
            dtype: of inputs and results.
        """
        ...


@runtime_checkable
class StoredRows(StoredWeight, Protocol):
    """One that takes plain numbers, row by row. `shards` yields what it is given."""

    def store(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Store some rows.

        Args:
            target: the view of the matrix on the meta device where they belong.
            values: [rows, k], of any float dtype, on the CPU, maybe not contiguous. The memory is
                used again after this call.
        """
        ...
