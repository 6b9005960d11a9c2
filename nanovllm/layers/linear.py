"""Linear layers that know which part of the checkpoint's weights is theirs.

Column-parallel ones split the outputs over the ranks, row-parallel ones the inputs, then sum.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import embedding, linear

from nanovllm.errors import ConfigError, UnsupportedModelError
from nanovllm.layers.fp8_config import Fp8Config
from nanovllm.layers.quantization import FP8, Fp8Weight, WeightMethod
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


class Linear(Matrix):
    """A matrix that is one checkpoint linear or several, which may be in FP8."""

    def __init__(self, num_outputs: int, num_inputs: int) -> None:
        super().__init__(num_outputs, num_inputs)
        self._fp8: Fp8Config | None = None
        self._scales: dict[str, tuple[torch.Tensor, int]] = {}  # and rows, by checkpoint linear

    def shards(self, prefix: str) -> Iterator[Shard]:
        """Yield what this linear, at dotted path `prefix`, is made of."""
        raise NotImplementedError

    def expect_fp8(self, prefix: str, fp8: Fp8Config) -> None:
        """Be made of FP8 weights and the scales of their blocks, unless `fp8` excludes it.

        Raises:
            ConfigError: this rank's part of a weight begins or ends within a block.
            UnsupportedModelError: some linears of this matrix are excluded and some are not.
        """
        assert self.weight is not None
        shards = [shard for shard in self.shards(prefix) if shard.name.endswith(".weight")]
        names = [shard.name.removesuffix(".weight") for shard in shards]
        excluded = {fp8.excludes(name) for name in names}
        if len(excluded) == 2:
            raise UnsupportedModelError(
                f"{', '.join(names)} are computed as one, so all or none must be in FP8"
            )
        if True in excluded:
            return
        for name, shard in zip(names, shards, strict=True):
            block = (fp8.block_outputs, fp8.block_inputs)[shard.dim]
            stop = shard.start + shard.target.shape[shard.dim]
            if block and (shard.start % block or (stop % block and stop < shard.shape[shard.dim])):
                raise ConfigError(
                    f"tensor_parallel_size {tensor_parallel().size} cuts {shard.name} "
                    f"{shard.shape} within an FP8 block of {block}; use a smaller size"
                )
            blocks = _blocks(shard.target.shape, fp8)
            scales = torch.ones(blocks, dtype=torch.float32, device=self.weight.device)
            self._scales[name] = scales, len(shard.target)
        self._fp8 = fp8
        empty = torch.empty_like(self.weight, dtype=FP8)
        self.weight = nn.Parameter(empty, requires_grad=False)

    def loaded_method(self, dtype: torch.dtype, *, native: bool) -> WeightMethod | None:
        """Return what keeps a weight that came in FP8 and multiplies `dtype`, else None."""
        if self._fp8 is None or self.weight is None:
            return None
        by_row = [
            scales.repeat_interleave(self._fp8.block_outputs, 0)[:rows]
            for scales, rows in self._scales.values()
        ]
        weight, block = self.weight.data, self._fp8.block_inputs or self.weight.shape[1]
        self._scales = {}
        return Fp8Weight(weight, torch.cat(by_row).to(weight.device), block, dtype, native=native)

    def weight_shards(
        self,
        name: str,
        shape: tuple[int, int],
        target: torch.Tensor,
        *,
        dim: int = 0,
        start: int,
    ) -> Iterator[Shard]:
        """Yield the weight of checkpoint linear `name`, and its scales where it is in FP8."""
        yield Shard(f"{name}.weight", shape, target, dim, start)
        if self._fp8 is not None:
            block = (self._fp8.block_outputs, self._fp8.block_inputs or shape[1])[dim]
            whole = _blocks(shape, self._fp8)
            scales, _ = self._scales[name]
            yield Shard(f"{name}.{self._fp8.scale_name}", whole, scales, dim, start // block)


def _blocks(shape: tuple[int, ...], fp8: Fp8Config) -> tuple[int, int]:
    """Return the shape of the scales of a weight of `shape`."""
    outputs, inputs = shape
    return -(-outputs // fp8.block_outputs), -(-inputs // (fp8.block_inputs or inputs))


class ColumnParallelLinear(Linear):
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
            yield from self.weight_shards(path, shape, weight, start=part.start)
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


class RowParallelLinear(Linear):
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
        yield from self.weight_shards(prefix, shape, self.weight.data, dim=1, start=start)
        if self.bias is not None:
            yield Shard(f"{prefix}.bias", (num_outputs,), self.bias.data)
