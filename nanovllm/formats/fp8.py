"""Weights in FP8, from such a checkpoint or rounded while others are loaded."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.checkpoint.shards import Shard
from nanovllm.errors import ConfigError, UnsupportedModelError
from nanovllm.formats.fp8_config import Fp8Config
from nanovllm.kernels.torch_kernels import Kernels, WeightMethod
from nanovllm.layers.linear import LinearBase
from nanovllm.utils.distributed import tensor_parallel

FP8 = torch.float8_e4m3fn

_ROWS_AT_ONCE = 1024
"""Rows quantised at once. Bounds the size of the float32 copies."""
_FP8_MAX = torch.finfo(FP8).max
_FP8_MATMUL = (8, 9)
"""Minimum compute capability of GPUs with FP8 tensor cores."""


class StoredFp8:
    """Loads the FP8 weights and the scales of the checkpoint linears that one layer merges.

    Args:
        weights: this rank's parts of the weights.
        device: of the layer.
    """

    def __init__(self, config: Fp8Config, weights: list[Shard], device: torch.device) -> None:
        self._config = config
        # By checkpoint weight and first row: the scales of the blocks, and the number of rows.
        self._scales: dict[tuple[str, int], tuple[torch.Tensor, int]] = {}
        for shard in weights:
            _check_blocks(shard, config)
            shape = _scales_shape(shard.target.shape, config)
            scales = torch.ones(shape, dtype=torch.float32, device=device)
            self._scales[shard.name, shard.start] = scales, len(shard.target)

    def shards(self, weight: Shard) -> Iterator[Shard]:
        """Yield the scales of `weight`."""
        block_inputs = self._config.block_inputs or weight.shape[1]
        block = (self._config.block_outputs, block_inputs)[weight.dim]
        scales, _ = self._scales[weight.name, weight.start]
        name = weight.name.removesuffix("weight") + self._config.scale_name
        shape = _scales_shape(weight.shape, self._config)
        yield Shard(name, shape, scales, weight.dim, weight.start // block)

    def method(self, weight: torch.Tensor, dtype: torch.dtype, kernels: Kernels) -> WeightMethod:
        by_row = [
            scales.repeat_interleave(self._config.block_outputs, 0)[:rows]
            for scales, rows in self._scales.values()
        ]
        self._scales = {}
        block = self._config.block_inputs or weight.shape[1]
        return Fp8Weight(weight, torch.cat(by_row).to(weight.device), block, dtype, kernels)


def expect_fp8(linear: LinearBase, prefix: str, fp8: Fp8Config) -> None:
    """Prepare to load FP8 weights with per-block scales, unless `fp8` excludes this layer.

    Raises:
        ConfigError: this rank's part of a weight begins or ends inside a block.
        UnsupportedModelError: `fp8` excludes only some of the merged linears.
    """
    assert linear.weight is not None
    shards = [shard for shard in linear.shards(prefix) if shard.name.endswith(".weight")]
    names = [shard.name.removesuffix(".weight") for shard in shards]
    excluded = [fp8.excludes(name) for name in names]
    if all(excluded):
        return
    if any(excluded):
        raise UnsupportedModelError(
            f"{', '.join(names)} are computed as one, so all or none must be in FP8"
        )
    linear.stored = StoredFp8(fp8, shards, linear.weight.device)
    empty = torch.empty_like(linear.weight, dtype=FP8)
    linear.weight = nn.Parameter(empty, requires_grad=False)


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


def quantize_fp8(
    x: torch.Tensor, group_size: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round x [n, k] to float8_e4m3fn values [n, k] with float32 scales [n, ceil(k / group_size)].

    The scale maps the largest magnitude of a group to 448, the largest float8_e4m3fn. A group is
    `group_size` neighbours in a row (None: the whole row).
    """
    n, k = x.shape
    group_size = group_size or max(k, 1)
    values = torch.empty_like(x, dtype=FP8)
    scales = x.new_empty(n, -(-k // group_size), dtype=torch.float32)
    for start in range(0, n, _ROWS_AT_ONCE):
        part = F.pad(x[start : start + _ROWS_AT_ONCE].float(), (0, -k % group_size))
        part = part.view(len(part), -1, group_size) if k else part[..., None]
        scale = part.abs().amax(2) / _FP8_MAX
        scale = torch.where(scale > 0, scale, 1.0)
        part = (part / scale[..., None]).clamp_(-_FP8_MAX, _FP8_MAX)
        values[start : start + _ROWS_AT_ONCE] = part.flatten(1)[:, :k]
        scales[start : start + _ROWS_AT_ONCE] = scale
    return values, scales


class Fp8Weight:
    """A weight in FP8, with a float32 scale for each group of inputs of each output.

    On a GPU with FP8 tensor cores, inputs are rounded to FP8 in groups of the same size. torch
    multiplies if a group is a whole row, else a Triton kernel does. On other devices, and for
    shapes and dtypes that these do not support, each product dequantises the weight first, which
    saves memory but no time.

    Args:
        values: [n, k] float8_e4m3fn.
        scales: [n, ceil(k / group_size)] float32.
        dtype: of inputs and results.
    """

    def __init__(
        self,
        values: torch.Tensor,
        scales: torch.Tensor,
        group_size: int,
        dtype: torch.dtype,
        kernels: Kernels,
    ) -> None:
        self._values, self._scales = values, scales
        self._group_size, self._dtype = group_size, dtype
        self._counters: torch.Tensor | None = None
        has_fp8 = values.is_cuda and torch.cuda.get_device_capability(values.device) >= _FP8_MATMUL
        self._kernels = kernels.fp8 if has_fp8 else None
        self._rowwise = (  # the requirements of torch._scaled_mm with a scale for each row
            has_fp8
            and dtype == torch.bfloat16
            and scales.shape[1] == 1
            and all(size % 16 == 0 for size in values.shape)
        )
        self._groupwise = (
            self._kernels is not None
            and dtype != torch.float32
            and scales.shape[1] > 1
            and self._kernels.inputs_of_a_step(group_size) > 0
        )

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if not self._rowwise and not self._groupwise:
            return F.linear(x, self._dequantize(self._values, self._scales), bias)
        rowwise = self._rowwise
        y = self.apply_rowwise(x) if rowwise else self.apply_groupwise(x, self._kernels)
        return y if bias is None else y.add_(bias)

    def apply_rowwise(self, x: torch.Tensor) -> torch.Tensor:
        """Round each row of `x` with one scale and multiply with torch."""
        values, scales = (quantize_fp8 if self._kernels is None else self._kernels.quantize)(x)
        return torch._scaled_mm(
            values, self._values.t(), scales, self._scales.t(), out_dtype=self._dtype
        )

    def apply_groupwise(self, x: torch.Tensor, kernels: Any) -> torch.Tensor:
        """Round each group of `x` with one scale and multiply with `kernels` (triton.fp8)."""
        group_size = self._group_size
        values, scales = kernels.quantize(x, group_size)
        if self._counters is None:
            self._counters = kernels.new_counters(self._values)
        weight = self._values, self._scales, group_size, self._dtype
        return kernels.multiply(values, scales, *weight, self._counters)

    def embedding(self, ids: torch.Tensor) -> torch.Tensor:
        return self._dequantize(self._values[ids], self._scales[ids])

    def _dequantize(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        if scales.shape[1] > 1:
            scales = scales.repeat_interleave(self._group_size, 1)[:, : values.shape[1]]
        return (values.float() * scales).to(self._dtype)
