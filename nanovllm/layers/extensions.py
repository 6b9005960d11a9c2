"""What another folder may say of a matrix: `formats` does."""

from collections.abc import Iterator
from typing import Protocol

import torch

from nanovllm.checkpoint.shards import Shard
from nanovllm.kernels.torch_kernels import Kernels, WeightMethod


class StoredWeight(Protocol):
    """How a checkpoint stores the weight of a matrix, if not as numbers of the model's dtype."""

    def shards(self, weight: Shard) -> Iterator[Shard]:
        """Yield the tensors that are stored beside a checkpoint linear's `weight`."""
        ...

    def method(self, weight: torch.Tensor, dtype: torch.dtype, kernels: Kernels) -> WeightMethod:
        """Return what multiplies with the loaded `weight`.

        Args:
            dtype: of inputs and results.
        """
        ...
