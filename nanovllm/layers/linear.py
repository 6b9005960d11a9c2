"""Linear layers split over the tensor-parallel ranks. Each knows which checkpoint tensors it loads.

Column-parallel layers split the outputs. Row-parallel layers split the inputs and sum the results
over the ranks. Knows no model and no file.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.checkpoint.loader import Shard
from nanovllm.errors import ConfigError, UnsupportedModelError
from nanovllm.formats.fp8_config import Fp8Config
from nanovllm.formats.quantization import FP8, Fp8Weight
from nanovllm.kernels.torch_kernels import Kernels, WeightMethod
from nanovllm.utils.distributed import all_reduce, tensor_parallel


class OutputSlice(NamedTuple):
    """The outputs of one checkpoint linear that this rank computes."""

    output_size: int
    """All outputs of the checkpoint linear."""
    start: int
    size: int


def divide(total: int, name: str) -> int:
    """Return `total` divided by the number of ranks.

    Raises:
        ConfigError: `total` is not a multiple of the number of ranks.
    """
    size = tensor_parallel().size
    if total % size:
        raise ConfigError(
            f"tensor_parallel_size {size} does not divide this model's {name} ({total})"
        )
    return total // size


class Matrix(nn.Module):
    """Base of linears and embeddings: this rank's weight [outputs, inputs].

    After loading, a `quant_method` may replace the weight.
    """

    def __init__(self, output_size: int, input_size: int) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(output_size, input_size))
        self.output_size = output_size
        self.quant_method: WeightMethod | None = None
        self.block_type: str | None = None
        """The GGUF type whose blocks `weight` receives as bytes; None: it receives numbers."""

    def shards(self, prefix: str) -> Iterator[Shard]:
        """Yield this rank's parts of the checkpoint tensors, for the layer at path `prefix`."""
        raise NotImplementedError

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x [T, inputs] times the transpose of the weight, plus `bias`: [T, outputs]."""
        if self.quant_method is None:
            assert self.weight is not None
            return F.linear(x, self.weight, bias)
        return self.quant_method.apply(x, bias)

    def embedding(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows `ids` [T] of the weight: [T, inputs]."""
        if self.quant_method is None:
            assert self.weight is not None
            return F.embedding(ids, self.weight)
        return self.quant_method.embedding(ids)

    def expect_blocks(self, block_type: str, weight: nn.Parameter) -> None:
        """Prepare to load a GGUF file's blocks of `block_type` into `weight`, uint8."""
        self.block_type, self.weight = block_type, weight

    def replace_weight(self, method: WeightMethod) -> None:
        """Use `method`, which was made from the weight, and release the weight."""
        self.quant_method, self.weight = method, None


class LinearBase(Matrix):
    """Base of the linears. One layer merges one or more checkpoint linears, which may be in FP8."""

    def __init__(self, output_size: int, input_size: int) -> None:
        super().__init__(output_size, input_size)
        self._fp8: Fp8Config | None = None
        # By checkpoint linear: the scales of its blocks, and its number of rows on this rank.
        self._scales: dict[str, tuple[torch.Tensor, int]] = {}

    def expect_fp8(self, prefix: str, fp8: Fp8Config) -> None:
        """Prepare to load FP8 weights with per-block scales, unless `fp8` excludes this layer.

        Raises:
            ConfigError: this rank's part of a weight begins or ends inside a block.
            UnsupportedModelError: `fp8` excludes only some of the merged linears.
        """
        assert self.weight is not None
        shards = [shard for shard in self.shards(prefix) if shard.name.endswith(".weight")]
        names = [shard.name.removesuffix(".weight") for shard in shards]
        excluded = [fp8.excludes(name) for name in names]
        if all(excluded):
            return
        if any(excluded):
            raise UnsupportedModelError(
                f"{', '.join(names)} are computed as one, so all or none must be in FP8"
            )
        for name, shard in zip(names, shards, strict=True):
            _check_blocks(shard, fp8)
            shape = _scales_shape(shard.target.shape, fp8)
            scales = torch.ones(shape, dtype=torch.float32, device=self.weight.device)
            self._scales[name] = scales, len(shard.target)
        self._fp8 = fp8
        empty = torch.empty_like(self.weight, dtype=FP8)
        self.weight = nn.Parameter(empty, requires_grad=False)

    def make_fp8_method(self, dtype: torch.dtype, kernels: Kernels) -> WeightMethod | None:
        """Return the method for a weight that was loaded in FP8, or None for any other weight.

        Args:
            dtype: of inputs and results.
        """
        if self._fp8 is None or self.weight is None:
            return None
        by_row = [
            scales.repeat_interleave(self._fp8.block_outputs, 0)[:rows]
            for scales, rows in self._scales.values()
        ]
        weight, block = self.weight.data, self._fp8.block_inputs or self.weight.shape[1]
        self._scales = {}
        return Fp8Weight(weight, torch.cat(by_row).to(weight.device), block, dtype, kernels)

    def weight_shards(
        self,
        name: str,
        shape: tuple[int, int],
        target: torch.Tensor,
        *,
        dim: int = 0,
        start: int,
    ) -> Iterator[Shard]:
        """Yield the weight of checkpoint linear `name`, and its scales if it is in FP8."""
        yield Shard(f"{name}.weight", shape, target, dim, start)
        if self._fp8 is not None:
            block = (self._fp8.block_outputs, self._fp8.block_inputs or shape[1])[dim]
            scales, _ = self._scales[name]
            scales_shape = _scales_shape(shape, self._fp8)
            yield Shard(f"{name}.{self._fp8.scale_name}", scales_shape, scales, dim, start // block)


def _check_blocks(shard: Shard, fp8: Fp8Config) -> None:
    """Raise ConfigError unless `shard` consists of whole FP8 blocks."""
    block = (fp8.block_outputs, fp8.block_inputs)[shard.dim]
    stop = shard.start + shard.target.shape[shard.dim]
    if block and (shard.start % block or (stop % block and stop < shard.shape[shard.dim])):
        raise ConfigError(
            f"tensor_parallel_size {tensor_parallel().size} cuts {shard.name} "
            f"{shard.shape} within an FP8 block of {block}; use a smaller size"
        )


def _scales_shape(shape: tuple[int, ...], fp8: Fp8Config) -> tuple[int, int]:
    """Return the shape of the scales that belong to a weight of `shape`."""
    outputs, inputs = shape
    return -(-outputs // fp8.block_outputs), -(-inputs // (fp8.block_inputs or inputs))


class ColumnParallelLinear(LinearBase):
    """Several checkpoint linears with the same input, merged: their outputs lie side by side.

    Args:
        slices: by the checkpoint linear's name, which replaces this module's name in the path.
    """

    def __init__(self, input_size: int, slices: Mapping[str, OutputSlice], *, bias: bool) -> None:
        output_size = sum(outputs.size for outputs in slices.values())
        super().__init__(output_size, input_size)
        self.slices = dict(slices)
        self.bias = nn.Parameter(torch.empty(output_size)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x, self.bias)

    def shards(self, prefix: str) -> Iterator[Shard]:
        assert self.weight is not None
        parent = prefix.rpartition(".")[0]
        row = 0
        for name, outputs in self.slices.items():
            rows = slice(row, row + outputs.size)
            row += outputs.size
            weight, path = self.weight.data[rows], f"{parent}.{name}"
            shape = (outputs.output_size, weight.shape[1])
            yield from self.weight_shards(path, shape, weight, start=outputs.start)
            if self.bias is not None:
                bias = self.bias.data[rows]
                yield Shard(f"{path}.bias", (outputs.output_size,), bias, start=outputs.start)


class MergedColumnParallelLinear(ColumnParallelLinear):
    """The gate_proj and up_proj of an MLP, each split evenly over the ranks.

    Args:
        output_sizes: all outputs of each checkpoint linear, by its name.
    """

    def __init__(self, input_size: int, output_sizes: Mapping[str, int], *, bias: bool) -> None:
        rank = tensor_parallel().rank
        slices = {}
        for name, output_size in output_sizes.items():
            size = divide(output_size, f"{name} outputs")
            slices[name] = OutputSlice(output_size, rank * size, size)
        super().__init__(input_size, slices, bias=bias)


class QKVParallelLinear(ColumnParallelLinear):
    """q_proj, k_proj and v_proj, split by heads.

    With more ranks than KV heads, neighbouring ranks hold copies of the same KV head.
    """

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
        slices = {
            "q_proj": OutputSlice(num_heads * head_dim, rank * q_size, q_size),
            "k_proj": kv,
            "v_proj": kv,
        }
        super().__init__(input_size, slices, bias=bias)


class RowParallelLinear(LinearBase):
    """A linear whose inputs are split over the ranks. The results are summed over the ranks."""

    def __init__(self, input_size: int, output_size: int, *, bias: bool) -> None:
        super().__init__(output_size, divide(input_size, "linear input size"))
        self.bias = nn.Parameter(torch.empty(output_size)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.bias if tensor_parallel().rank == 0 else None  # the sum must contain it once
        return all_reduce(self.linear(x, bias))

    def shards(self, prefix: str) -> Iterator[Shard]:
        assert self.weight is not None
        output_size, size = self.weight.shape
        start = tensor_parallel().rank * size
        shape = (output_size, tensor_parallel().size * size)
        yield from self.weight_shards(prefix, shape, self.weight.data, dim=1, start=start)
        if self.bias is not None:
            yield Shard(f"{prefix}.bias", (output_size,), self.bias.data)
