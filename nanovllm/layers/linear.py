"""Linear layers that know which part of the checkpoint's weights is theirs.

Column-parallel ones split the outputs over the ranks, row-parallel ones the inputs, then sum.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import embedding, linear

from nanovllm.errors import ConfigError
from nanovllm.layers.quantization import WeightMethod
from nanovllm.utils.distributed import all_reduce, tensor_parallel
from nanovllm.utils.loader import Shard


class Part(NamedTuple):
    """A checkpoint linear merged into one of ours: its outputs, and those that this rank takes."""

    num_outputs: int
    start: int
    size: int


def divide(what: str, total: int) -> int:
    """Return `total` divided among the ranks.

    Raises:
        ConfigError: it does not divide.
    """
    size = tensor_parallel().size
    if total % size:
        raise ConfigError(
            f"tensor_parallel_size {size} does not divide this model's {what} ({total})"
        )
    return total // size


class Matrix(nn.Module):
    """A weight [outputs, inputs] of this rank: as loaded, or as a method keeps it."""

    def __init__(self, num_outputs: int, num_inputs: int) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(num_outputs, num_inputs))
        self.num_outputs = num_outputs
        self._method: WeightMethod | None = None

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x [T, inputs] times the transpose of the weight, plus `bias`."""
        if self._method is None:
            assert self.weight is not None
            return linear(x, self.weight, bias)
        y = self._method.multiply(x)
        return y if bias is None else y.add_(bias)

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the weight's `rows` [T]: [T, inputs]."""
        if self._method is None:
            assert self.weight is not None
            return embedding(rows, self.weight)
        return self._method.gather(rows)

    def keep_as(self, method: WeightMethod) -> None:
        """Let `method`, made from the weight, replace it."""
        self._method, self.weight = method, None


class ColumnParallelLinear(Matrix):
    """One matrix of several checkpoint linears that read the same input; outputs lie side by side.

    Args:
        parts: by checkpoint name, a sibling of this module.
    """

    def __init__(self, num_inputs: int, parts: Mapping[str, Part], *, bias: bool) -> None:
        num_outputs = sum(part.size for part in parts.values())
        super().__init__(num_outputs, num_inputs)
        self.parts = dict(parts)
        self.num_inputs = num_inputs
        self.bias = nn.Parameter(torch.empty(num_outputs)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply(x, self.bias)

    def shards(self, prefix: str) -> Iterator[Shard]:
        assert self.weight is not None
        parent = prefix.rpartition(".")[0]
        row = 0
        for name, part in self.parts.items():
            rows = slice(row, row + part.size)
            row += part.size
            weight, path = self.weight.data[rows], f"{parent}.{name}"
            shape = (part.num_outputs, self.num_inputs)
            yield Shard(f"{path}.weight", shape, weight, start=part.start)
            if self.bias is not None:
                bias = self.bias.data[rows]
                yield Shard(f"{path}.bias", (part.num_outputs,), bias, start=part.start)


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Linears of equal rank in an MLP, such as gate_proj and up_proj, each split evenly."""

    def __init__(self, num_inputs: int, outputs: Mapping[str, int], *, bias: bool) -> None:
        rank = tensor_parallel().rank
        sizes = {name: divide(f"{name} outputs", total) for name, total in outputs.items()}
        parts = {name: Part(outputs[name], rank * size, size) for name, size in sizes.items()}
        super().__init__(num_inputs, parts, bias=bias)


class QKVParallelLinear(ColumnParallelLinear):
    """q_proj, k_proj and v_proj, split by heads. Ranks beyond the number of KV heads share them."""

    def __init__(
        self, num_inputs: int, num_heads: int, num_kv_heads: int, head_dim: int, *, bias: bool
    ) -> None:
        rank, size = tensor_parallel().rank, tensor_parallel().size
        self.num_heads = divide("num_attention_heads", num_heads)
        if size > num_kv_heads:
            if size % num_kv_heads:
                raise ConfigError(
                    f"tensor_parallel_size {size} is no multiple of this model's "
                    f"num_key_value_heads ({num_kv_heads})"
                )
            self.num_kv_heads, kv_start = 1, rank * num_kv_heads // size
        else:
            self.num_kv_heads = divide("num_key_value_heads", num_kv_heads)
            kv_start = rank * self.num_kv_heads
        q_size, kv_size = self.num_heads * head_dim, self.num_kv_heads * head_dim
        kv = Part(num_kv_heads * head_dim, kv_start * head_dim, kv_size)
        self.sizes = (q_size, kv_size, kv_size)
        parts = {
            "q_proj": Part(num_heads * head_dim, rank * q_size, q_size),
            "k_proj": kv,
            "v_proj": kv,
        }
        super().__init__(num_inputs, parts, bias=bias)


class RowParallelLinear(Matrix):
    """A linear whose inputs are split over the ranks and whose outputs are summed."""

    def __init__(self, num_inputs: int, num_outputs: int, *, bias: bool) -> None:
        super().__init__(num_outputs, divide("inputs of a linear", num_inputs))
        self.num_inputs = num_inputs
        self.bias = nn.Parameter(torch.empty(num_outputs)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.bias if tensor_parallel().rank == 0 else None  # once in the sum
        return all_reduce(self.multiply(x, bias))

    def shards(self, prefix: str) -> Iterator[Shard]:
        assert self.weight is not None
        num_outputs, size = self.weight.shape
        start = tensor_parallel().rank * size
        shape = (num_outputs, self.num_inputs)
        yield Shard(f"{prefix}.weight", shape, self.weight.data, dim=1, start=start)
        if self.bias is not None:
            yield Shard(f"{prefix}.bias", (num_outputs,), self.bias.data)
