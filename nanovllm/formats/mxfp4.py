"""Experts in MXFP4, as gpt-oss stores them: 32 numbers of 4 bits (E2M1) share a power of two.

They stay in their bits: a weight is twice the number, which is an integer, times half the scale.
"""

import dataclasses
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.checkpoint.shards import Shard
from nanovllm.errors import ConfigError
from nanovllm.kernels.cpu import ops as cpu_ops
from nanovllm.kernels.cpu.kernels import CKernels
from nanovllm.kernels.cpu.packed import Panels, PanelWeight
from nanovllm.kernels.torch_kernels import Kernels, WeightMethod
from nanovllm.layers.experts import StackedLinear
from nanovllm.utils.distributed import tensor_parallel

MXFP4 = "mxfp4"
"""The `quant_method` of config.json."""
_BLOCK, _BLOCK_BYTES = 32, 16
_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the number, by its bits."""
_HALF_SCALE_BIAS = 128
"""A scale s stands for 2 ** (s - 127), half of it for 2 ** (s - 128)."""
_NO_NUMBER = 255


class StoredMxfp4:
    """Loads a matrix of experts and its scales.

    Args:
        matrix: whose weight has [rows, inputs] numbers.
    """

    def __init__(self, matrix: StackedLinear) -> None:
        assert matrix.weight is not None
        rows, inputs = matrix.weight.shape
        shape, device = (rows, inputs // _BLOCK), matrix.weight.device
        self._scales = torch.full(shape, 127, dtype=torch.uint8, device=device)

    def shards(self, weight: Shard) -> Iterator[Shard]:
        """Yield the blocks and the scales of a part of an expert's weight, [E, outputs, bytes]."""
        num_experts, rows, num_bytes = weight.shape
        assert weight.index is not None
        blocks = weight.target.view(len(weight.target), -1, _BLOCK_BYTES)
        start = weight.start // _BLOCK_BYTES if weight.dim else weight.start
        first = weight.target.storage_offset() // weight.target.shape[1]
        scales = self._scales[first : first + len(weight.target)]
        shape = (num_experts, rows, num_bytes // _BLOCK_BYTES)
        part = dataclasses.replace(weight, start=start)
        yield dataclasses.replace(
            part, name=f"{weight.name}_blocks", shape=(*shape, _BLOCK_BYTES), target=blocks
        )
        yield dataclasses.replace(part, name=f"{weight.name}_scales", shape=shape, target=scales)

    def method(self, weight: torch.Tensor, dtype: torch.dtype, kernels: Kernels) -> WeightMethod:
        if isinstance(kernels, CKernels):
            return native_weight(weight, self._scales)
        if kernels.name == "triton":
            raise ConfigError("experts in MXFP4 run on CPUs alone; choose device='cpu'")
        return Fp4Weight(weight, self._scales, dtype)


def expect_mxfp4(matrix: StackedLinear) -> None:
    """Prepare `matrix` to load a weight in MXFP4.

    Raises:
        ConfigError: this rank's part of a weight begins or ends inside a block.
    """
    assert matrix.weight is not None
    rows, inputs = matrix.weight.shape
    if inputs % _BLOCK:
        raise ConfigError(
            f"tensor_parallel_size {tensor_parallel().size} leaves {inputs} inputs of an expert to "
            f"a rank, which are no whole MXFP4 blocks of {_BLOCK}; use a smaller size"
        )
    matrix.stored = StoredMxfp4(matrix)
    matrix.stored_as = matrix.stored_as._replace(linears=None, transposed=False)
    empty = torch.empty(rows, inputs // 2, dtype=torch.uint8, device=matrix.weight.device)
    matrix.weight = nn.Parameter(empty, requires_grad=False)


def native_weight(pairs: torch.Tensor, scales: torch.Tensor) -> PanelWeight:
    """Return a weight in MXFP4 for the C kernels.

    Args:
        pairs: [n, k / 2] uint8, the even number of a pair in the low half.
        scales: [n, k / 32] uint8.
    """
    values = _numbers(pairs).view(torch.int8) - 8
    half = _half_scales(scales).bfloat16().view(torch.float16)  # the kernels read its bits
    return PanelWeight(Panels(*cpu_ops.pack_int(values, half, None, 4), 4, fp4=True), len(pairs))


class Fp4Weight:
    """A weight in MXFP4 in plain torch; see `native_weight`.

    Args:
        dtype: of inputs and results.
    """

    def __init__(self, pairs: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> None:
        self._pairs, self._scales, self._dtype = pairs, scales, dtype

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, self._wide(self._pairs, self._scales), bias)

    def embedding(self, ids: torch.Tensor) -> torch.Tensor:
        return self._wide(F.embedding(ids, self._pairs), F.embedding(ids, self._scales))

    def _wide(self, pairs: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        table = torch.tensor(_DOUBLED, dtype=torch.float32, device=pairs.device)
        numbers = table[_numbers(pairs).int()].view(len(pairs), -1, _BLOCK)
        return (numbers * _half_scales(scales)[..., None]).flatten(1).to(self._dtype)


def _numbers(pairs: torch.Tensor) -> torch.Tensor:
    """Return the 4 bits of each number of `pairs` [n, k / 2]: [n, k] uint8."""
    return torch.stack([pairs & 15, pairs >> 4], -1).flatten(1)


def _half_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return half of what the bits of `scales` stand for, in float32."""
    half = torch.ldexp(
        torch.ones(scales.shape, device=scales.device), scales.int() - _HALF_SCALE_BIAS
    )
    return half.masked_fill(scales == _NO_NUMBER, torch.nan)
