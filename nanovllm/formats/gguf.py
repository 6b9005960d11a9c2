"""Weights that stay in the blocks of a GGUF file: the types that an `IntTensor` holds exactly.

Layouts: ggml's ggml-common.h.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import nn

from nanovllm.checkpoint.gguf_header import GGUF_TYPES
from nanovllm.checkpoint.loader import TensorInfo, read_header
from nanovllm.checkpoint.shards import Shard, model_shards
from nanovllm.errors import ConfigError
from nanovllm.formats.integer import IntTensor, make_int_method
from nanovllm.kernels.torch_kernels import Kernels, WeightMethod
from nanovllm.layers.linear import LinearBase, Matrix
from nanovllm.layers.pieces import SmallLinear
from nanovllm.options.config import Config
from nanovllm.utils.distributed import tensor_parallel

logger = logging.getLogger(__name__)

BLOCK_BITS = {"Q8_0": 8, "Q5_0": 8, "Q4_0": 4, "Q4_1": 4}
"""Bits in which a value is kept, by the name of the type."""
BLOCK_TYPES = {found.name: found for found in GGUF_TYPES.values() if found.name in BLOCK_BITS}
"""The types, by name."""


class StoredBlocks:
    """A weight that receives the bytes of blocks of `block_type`."""

    def __init__(self, block_type: str) -> None:
        self.block_type = block_type

    def shards(self, weight: Shard) -> Iterator[Shard]:
        return iter(())

    def method(self, weight: torch.Tensor, dtype: torch.dtype, kernels: Kernels) -> WeightMethod:
        return make_int_method(unpack_blocks(weight, self.block_type), dtype, kernels)


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
        fifth = values[..., :4, None] >> torch.arange(8, dtype=torch.uint8) & 1
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


def keep_blocks(
    model: nn.Module,
    sharing: Iterable[list[tuple[str, Matrix]]],
    config: Config,
    dtype: torch.dtype,
    file: Path,
) -> None:
    """Prepare the matrices whose weights stay in the bits that GGUF `file` has; log which.

    The linears that are computed as one must be of the same type. A `SmallLinear` is converted: its
    outputs are gates, and inputs of weights in few bits are rounded.

    Args:
        sharing: `model`'s matrices with their paths; those of one list have the same weight.
        dtype: of the model.

    Raises:
        ConfigError: this rank's part of a weight begins or ends inside a block.
    """
    header = read_header(file)
    shards_of = dict(model_shards(model, header))
    kept: Counter[str] = Counter()
    for matrices in sharing:
        _, matrix = matrices[0]
        weight = matrix.weight
        assert weight is not None
        shards = [s for s in shards_of[matrix] if s.name.endswith(".weight")]
        block_type = _common_type(shards, header)
        if block_type not in BLOCK_BITS or dtype == torch.float32:
            continue
        if isinstance(matrix, SmallLinear) or not _keeps(block_type, matrix, config.quantization):
            continue
        num_rows, input_size = weight.shape
        stored = BLOCK_TYPES[block_type]
        stored_blocks = StoredBlocks(block_type)
        if input_size % stored.block_size:
            raise ConfigError(
                f"tensor_parallel_size {tensor_parallel().size} cuts {shards[0].name} "
                f"{shards[0].shape} within a {block_type} block of {stored.block_size}; use a "
                'smaller size, or quantization="none"'
            )
        shape = num_rows, stored.row_bytes(input_size)
        blocks = nn.Parameter(weight.new_empty(shape, dtype=torch.uint8), requires_grad=False)
        for _, sharer in matrices:
            sharer.stored, sharer.weight = stored_blocks, blocks
        kept[block_type] += len(shards)
    if tensor_parallel().rank == 0:
        rest = Counter(tensor.dtype for tensor in header.values()) - kept
        rounded = config.quantization not in (None, "none")
        logger.info(
            "%s: tensors that stay in their bits: %s; converted to %s%s: %s",
            file,
            _counts(kept),
            str(dtype).removeprefix("torch."),
            f", matrices rounded to {config.quantization}" if rounded else "",
            _counts(rest),
        )


def _common_type(shards: list[Shard], header: dict[str, TensorInfo]) -> str:
    """Return the type of the tensors of `shards`; "" if they have no blocks of one type."""
    found = [header.get(shard.name) for shard in shards]
    matching = all(
        tensor is not None and tensor.shape == shard.shape and tensor.has_blocks
        for tensor, shard in zip(found, shards, strict=True)
    )
    types = {tensor.dtype for tensor in found if tensor is not None}
    return types.pop() if matching and len(types) == 1 else ""


def _counts(types: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(types.items())) or "none"


def _keeps(block_type: str, matrix: Matrix, quantization: str | None) -> bool:
    """Return whether `matrix` keeps a GGUF file's blocks, given what the user asked for."""
    if quantization == "none":
        return False
    if quantization == "fp8":
        return not isinstance(matrix, LinearBase)
    return quantization is None or BLOCK_BITS[block_type] <= int(quantization.removeprefix("int"))
