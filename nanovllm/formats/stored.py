"""What all weights have in common that a checkpoint stores as numbers of their own and scales.

Knows no format and no layout.
"""

from collections.abc import Iterator

import torch

from nanovllm.checkpoint.shards import Shard
from nanovllm.errors import ConfigError, UnsupportedModelError
from nanovllm.formats.fields import LoadedField
from nanovllm.kernels.torch_kernels import Kernels, PlainWeight, WeightMethod
from nanovllm.layers.experts import StackedLinear
from nanovllm.layers.linear import Matrix
from nanovllm.layers.pieces import SmallLinear


class StoredNumbers:
    """Base of what loads the checkpoint linears that one matrix merges; see `StoredWeight`.

    What the kernels do not hold is widened to the model's dtype.

    Args:
        label: names the form, for the log and for errors.
    """

    def __init__(self, matrix: Matrix, label: str) -> None:
        assert matrix.weight is not None
        self.label = label
        self.description = ""
        self._shape = tuple(matrix.weight.shape)
        self._device = matrix.weight.device
        self._is_experts = isinstance(matrix, StackedLinear)
        self._is_gates = isinstance(matrix, SmallLinear)
        self._loaded: list[LoadedField] = []
        """What is released once the method is made."""

    def shards(self, weight: Shard) -> Iterator[Shard]:
        """Yield the tensors that stand in place of `weight`."""
        if weight.index is not None:
            raise UnsupportedModelError(
                f"{weight.name}: {self.label} is not supported where all experts are in one tensor"
            )
        yield from self._tensors(weight)

    def method(self, dtype: torch.dtype, kernels: Kernels) -> WeightMethod:
        """Return what multiplies.

        Raises:
            CheckpointError: a scale is no finite number, or another tensor is out of its range.
            ConfigError: experts on a GPU.
        """
        if self._is_experts and kernels.name == "triton":
            raise ConfigError(f"experts in {self.label} run on CPUs alone; choose device='cpu'")
        method, words = self._kept(dtype, kernels)
        if method is None:
            words = f"widened to {str(dtype).removeprefix('torch.')} because {words}"
            wide = self._wide(dtype)
            method = kernels.pack(wide, is_embedding=self._is_experts) or PlainWeight(wide)
        self.description = f"in {self.label}: {words}"
        for field in self._loaded:
            field.release()
        return method

    def _tensors(self, weight: Shard) -> Iterator[Shard]:
        """Yield the tensors that stand in place of `weight`, which is of one linear."""
        raise NotImplementedError

    def _kept(self, dtype: torch.dtype, kernels: Kernels) -> tuple[WeightMethod | None, str]:
        """Return the method of few bits, and what it is; or None, and why there is none."""
        raise NotImplementedError

    def _wide(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight in `dtype`."""
        raise NotImplementedError
