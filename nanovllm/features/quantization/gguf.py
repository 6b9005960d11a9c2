"""Weights that stay in the blocks of a GGUF file: the types that an `IntTensor` holds exactly.

Layouts: ggml's ggml-common.h.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator

import torch

from nanovllm.errors import ConfigError
from nanovllm.features.quantization.integer import BITS, IntRows, IntTensor
from nanovllm.features.quantization.quantized_fields import PanelRows, first_row
from nanovllm.features.quantization.rounding import EXACT
from nanovllm.kernels.cpu.library import torch_on_one_thread
from nanovllm.kernels.torch_kernels import Kernels, LinearMethod
from nanovllm.layers.linear import LinearBase, WeightFormat, WeightModule
from nanovllm.loading.gguf_header import GGUF_TYPES
from nanovllm.loading.shards import Shard
from nanovllm.loading.tensor_files import TensorInfo
from nanovllm.utils.distributed import tensor_parallel

BLOCK_BITS = {"Q8_0": 8, "Q5_0": 8, "Q4_0": 4, "Q4_1": 4}
"""Bits in which a value is kept, by the name of the type."""
BLOCK_TYPES = {found.name: found for found in GGUF_TYPES.values() if found.name in BLOCK_BITS}
"""The types, by name."""
_BYTES_AT_ONCE = 2**20
"""Unpacked at once: what the loader reads at once."""


class GgufFormat(WeightFormat):
    """A GGUF file whose blocks stay as they are, where that is exact and the user wants it.

    The linears that are computed as one must be of the same type. A `SmallLinear` is converted: its
    outputs are gates, and inputs of weights in few bits are rounded. So are routers.
    """

    name = "GGUF"

    def __init__(
        self, header: dict[str, TensorInfo], quantization: str | None, kernels: Kernels
    ) -> None:
        self._header = header
        self._quantization = quantization
        self._kernels = kernels
        self._kept: Counter[str] = Counter()
        self._dtype = torch.float32

    def quantized(self, matrix: WeightModule, names: list[str]) -> "QuantizedBlocks | None":
        assert matrix.weight is not None
        self._dtype = matrix.weight.dtype
        block_type = self._common_type(names)
        if block_type not in BLOCK_BITS or self._dtype == torch.float32:
            return None
        if isinstance(matrix, EXACT) or not _keeps(block_type, matrix, self._quantization):
            return None
        stored = BLOCK_TYPES[block_type]
        if matrix.weight.shape[1] % stored.block_size:
            raise ConfigError(
                f"tensor_parallel_size {tensor_parallel().size} cuts {names[0]}.weight "
                f"{self._header[names[0] + '.weight'].shape} within a {block_type} block of "
                f'{stored.block_size}; use a smaller size, or quantization="none"'
            )
        self._kept[block_type] += len(names)
        return QuantizedBlocks(block_type, matrix.weight, self._kernels)

    def summary(self) -> str:
        """Say how many tensors stay in their bits, after all matrices were asked for."""
        rest = Counter(tensor.dtype for tensor in self._header.values()) - self._kept
        rounded = self._quantization not in (None, "none")
        return (
            f"tensors that stay in their bits: {_counts(self._kept)}; converted to "
            f"{str(self._dtype).removeprefix('torch.')}"
            f"{f', matrices rounded to {self._quantization}' if rounded else ''}: {_counts(rest)}"
        )

    def _common_type(self, names: list[str]) -> str:
        """Return the type of the linears `names`; "" if they have no blocks of one type."""
        found = [self._header.get(f"{name}.weight") for name in names]
        types = {tensor.dtype if tensor and tensor.has_blocks else "" for tensor in found}
        return types.pop() if len(types) == 1 else ""


class QuantizedBlocks:
    """A weight whose blocks of `block_type` are packed as they are read, a few rows at a time."""

    def __init__(self, block_type: str, like: torch.Tensor, kernels: Kernels) -> None:
        self.block_type = self.label = block_type
        self.description = f"in {block_type}, kept in {BLOCK_BITS[block_type]} bits"
        self._row_bytes = BLOCK_TYPES[block_type].row_bytes(like.shape[1])
        self._device = like.device
        self._rows = IntRows(len(like), like.dtype, kernels)
        self._coming = PanelRows(len(like), self._store_part, _BYTES_AT_ONCE)

    def shards(self, weight: Shard) -> Iterator[Shard]:
        """Yield the tensor of `weight` as bytes: [outputs, bytes of a row]."""
        row_bytes = BLOCK_TYPES[self.block_type].row_bytes
        first = first_row(weight)
        self._coming.expect(first)
        outputs, inputs = weight.shape
        rows = torch.empty(
            first + len(weight.target), self._row_bytes, dtype=torch.uint8, device="meta"
        )
        yield dataclasses.replace(
            weight,
            shape=(outputs, row_bytes(inputs)),
            target=rows[first:],
            start=row_bytes(weight.start) if weight.dim else weight.start,
        )

    def store(self, target: torch.Tensor, values: torch.Tensor) -> None:
        first = target.storage_offset() // self._row_bytes
        self._coming.add(first, values.to(self._device))

    def method(self, dtype: torch.dtype, kernels: Kernels) -> LinearMethod:
        self._coming.finish()
        return self._rows.method()

    def _store_part(self, first: int, blocks: torch.Tensor) -> None:
        with torch_on_one_thread():  # so that none spins beside the kernel that packs
            self._rows.store(first, unpack_blocks(blocks, self.block_type))


def unpack_blocks(blocks: torch.Tensor, block_type: str) -> IntTensor:
    """Return the weight in `blocks`, uint8 [n, bytes of a row]: the same numbers, bit for bit.

    A block is a float16 scale, for Q4_1 a float16 minimum, then the values. In 4 bits, byte i has
    value i in its low half and value i + 16 in its high half, each one plus 8. Q5_0 has four bytes
    of fifth bits before these, and adds 16.
    """
    by_block = blocks.view(len(blocks), -1, BLOCK_TYPES[block_type].block_bytes)
    num_halves = 2 if block_type == "Q4_1" else 1
    halves = by_block[..., : 2 * num_halves].contiguous().view(torch.float16)
    values = by_block[..., 2 * num_halves :]
    if block_type == "Q5_0":
        fifth = (
            values[..., :4, None] >> torch.arange(8, dtype=torch.uint8, device=values.device) & 1
        )
        low = torch.cat([values[..., 4:] & 15, values[..., 4:] >> 4], -1)
        values = (low | fifth.flatten(-2) << 4).view(torch.int8) - 16
    elif BLOCK_BITS[block_type] == 8:
        values = values.contiguous().view(torch.int8)
    else:
        values = torch.cat([values & 15, values >> 4], -1).view(torch.int8) - 8
    minimums = halves[..., 1].contiguous() if num_halves == 2 else None
    return IntTensor(
        values.flatten(1), halves[..., 0].contiguous(), minimums, BLOCK_BITS[block_type]
    )


def _counts(types: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(types.items())) or "none"


def _keeps(block_type: str, matrix: WeightModule, quantization: str | None) -> bool:
    """Return whether `matrix` keeps a GGUF file's blocks, given what the user asked for."""
    if quantization == "none":
        return False
    if quantization == "fp8":
        return not isinstance(matrix, LinearBase)
    return quantization is None or BLOCK_BITS[block_type] <= BITS[quantization]
