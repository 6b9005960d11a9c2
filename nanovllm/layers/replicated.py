"""A linear that is not split over the ranks."""

from collections.abc import Iterator

import torch

from nanovllm.checkpoint.shards import Shard
from nanovllm.layers.linear import LinearBase


class ReplicatedLinear(LinearBase):
    """A small linear without a bias, which each rank computes whole."""

    def __init__(self, input_size: int, output_size: int) -> None:
        super().__init__(output_size, input_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def shards(self, prefix: str) -> Iterator[Shard]:
        assert self.weight is not None
        shape = (self.weight.shape[0], self.weight.shape[1])
        yield from self.weight_shards(Shard(f"{prefix}.weight", shape, self.weight.data))
