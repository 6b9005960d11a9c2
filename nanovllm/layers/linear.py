"""Linear layers that know which part of the checkpoint's weights is theirs.

Column-parallel ones split the outputs over the ranks, row-parallel ones the inputs, then sum.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.errors import ConfigError, UnsupportedModelError
from nanovllm.layers.fp8_config import Fp8Config
from nanovllm.layers.quantization import FP8, Fp8Weight, QuantizeMethod
from nanovllm.utils.distributed import all_reduce, tensor_parallel
from nanovllm.utils.loader import Shard


class OutputSlice(NamedTuple):
    """A checkpoint linear merged into one of ours: its outputs, and those that this rank takes."""

    output_size: int
    start: int
    size: int


def divide(total: int, name: str) -> int:
    """Return `total` divided among the ranks.

    Raises:
        ConfigError: it does not divide.
    """
    size = tensor_parallel().size
    if total % size:
        raise ConfigError(
            f"tensor_parallel_size {size} does not divide this model's {name} ({total})"
        )
    return total // size


class Matrix(nn.Module):
    """A weight [outputs, inputs] of this rank: as loaded, or as a method keeps it."""

    def __init__(self, output_size: int, input_size: int) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(output_size, input_size))
        self.output_size = output_size
        self.quant_method: QuantizeMethod | None = None

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x [T, inputs] times the transpose of the weight, plus `bias`."""
        if self.quant_method is None:
            assert self.weight is not None
            return F.linear(x, self.weight, bias)
        y = self.quant_method.apply(x)
        return y if bias is None else y.add_(bias)

    def embedding(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the weight's `rows` [T]: [T, inputs]."""
        if self.quant_method is None:
            assert self.weight is not None
            return F.embedding(rows, self.weight)
        return self.quant_method.embedding(rows)

    def replace_weight(self, method: QuantizeMethod) -> None:
        """Let `method`, made from the weight, replace it."""
        self.quant_method, self.weight = method, None


class LinearBase(Matrix):
    """A matrix that is one checkpoint linear or several, which may be in FP8."""

    def __init__(self, output_size: int, input_size: int) -> None:
        super().__init__(output_size, input_size)
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
            blocks = _scales_shape(shard.target.shape, fp8)
            scales = torch.ones(blocks, dtype=torch.float32, device=self.weight.device)
            self._scales[name] = scales, len(shard.target)
        self._fp8 = fp8
        empty = torch.empty_like(self.weight, dtype=FP8)
        self.weight = nn.Parameter(empty, requires_grad=False)

    def make_fp8_method(self, dtype: torch.dtype, *, native: bool) -> QuantizeMethod | None:
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
            whole = _scales_shape(shape, self._fp8)
            scales, _ = self._scales[name]
            yield Shard(f"{name}.{self._fp8.scale_name}", whole, scales, dim, start // block)


def _scales_shape(shape: tuple[int, ...], fp8: Fp8Config) -> tuple[int, int]:
    """Return the shape of the scales of a weight of `shape`."""
    outputs, inputs = shape
    return -(-outputs // fp8.block_outputs), -(-inputs // (fp8.block_inputs or inputs))


class ColumnParallelLinear(LinearBase):
    """One matrix of several checkpoint linears that read the same input; outputs lie side by side.

    Args:
        slices: by checkpoint name, a sibling of this module.
    """

    def __init__(self, input_size: int, slices: Mapping[str, OutputSlice], *, bias: bool) -> None:
        output_size = sum(part.size for part in slices.values())
        super().__init__(output_size, input_size)
        self.slices = dict(slices)
        self.input_size = input_size
        self.bias = nn.Parameter(torch.empty(output_size)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x, self.bias)

    def shards(self, prefix: str) -> Iterator[Shard]:
        assert self.weight is not None
        parent = prefix.rpartition(".")[0]
        row = 0
        for name, part in self.slices.items():
            rows = slice(row, row + part.size)
            row += part.size
            weight, path = self.weight.data[rows], f"{parent}.{name}"
            shape = (part.output_size, self.input_size)
            yield from self.weight_shards(path, shape, weight, start=part.start)
            if self.bias is not None:
                bias = self.bias.data[rows]
                yield Shard(f"{path}.bias", (part.output_size,), bias, start=part.start)


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Linears of equal rank in an MLP, such as gate_proj and up_proj, each split evenly."""

    def __init__(self, input_size: int, outputs: Mapping[str, int], *, bias: bool) -> None:
        rank = tensor_parallel().rank
        sizes = {name: divide(total, f"{name} outputs") for name, total in outputs.items()}
        slices = {
            name: OutputSlice(outputs[name], rank * size, size) for name, size in sizes.items()
        }
        super().__init__(input_size, slices, bias=bias)


class QKVParallelLinear(ColumnParallelLinear):
    """q_proj, k_proj and v_proj, split by heads. Ranks beyond the number of KV heads share them."""

    def __init__(
        self, input_size: int, num_heads: int, num_kv_heads: int, head_dim: int, *, bias: bool
    ) -> None:
        rank, size = tensor_parallel().rank, tensor_parallel().size
        self.num_heads = divide(num_heads, "num_attention_heads")
        if size > num_kv_heads:
            if size % num_kv_heads:
                raise ConfigError(
                    f"tensor_parallel_size {size} is no multiple of this model's "
                    f"num_key_value_heads ({num_kv_heads})"
                )
            self.num_kv_heads, kv_start = 1, rank * num_kv_heads // size
        else:
            self.num_kv_heads = divide(num_kv_heads, "num_key_value_heads")
            kv_start = rank * self.num_kv_heads
        q_size, kv_size = self.num_heads * head_dim, self.num_kv_heads * head_dim
        kv = OutputSlice(num_kv_heads * head_dim, kv_start * head_dim, kv_size)
        self.split_sizes = (q_size, kv_size, kv_size)
        slices = {
            "q_proj": OutputSlice(num_heads * head_dim, rank * q_size, q_size),
            "k_proj": kv,
            "v_proj": kv,
        }
        super().__init__(input_size, slices, bias=bias)


class RowParallelLinear(LinearBase):
    """A linear whose inputs are split over the ranks and whose outputs are summed."""

    def __init__(self, input_size: int, output_size: int, *, bias: bool) -> None:
        super().__init__(output_size, divide(input_size, "inputs of a linear"))
        self.input_size = input_size
        self.bias = nn.Parameter(torch.empty(output_size)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.bias if tensor_parallel().rank == 0 else None  # once in the sum
        return all_reduce(self.linear(x, bias))

    def shards(self, prefix: str) -> Iterator[Shard]:
        assert self.weight is not None
        output_size, size = self.weight.shape
        start = tensor_parallel().rank * size
        shape = (output_size, self.input_size)
        yield from self.weight_shards(prefix, shape, self.weight.data, dim=1, start=start)
        if self.bias is not None:
            yield Shard(f"{prefix}.bias", (output_size,), self.bias.data)
