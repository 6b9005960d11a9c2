"""GGUF's block types that an `IntTensor` holds exactly, and how their bytes are read.

Layouts: ggml's ggml-common.h. Knows no layer and no file.
"""

import torch

from nanovllm.checkpoint.gguf_header import GGUF_TYPES
from nanovllm.formats.quantization import IntTensor

BLOCK_BITS = {"Q8_0": 8, "Q4_0": 4, "Q4_1": 4}
"""Bits of a value, by the name of the type."""
BLOCK_TYPES = {found.name: found for found in GGUF_TYPES.values() if found.name in BLOCK_BITS}
"""The types, by name."""


def unpack_blocks(blocks: torch.Tensor, block_type: str) -> IntTensor:
    """Return the weight in `blocks`, uint8 [n, bytes of a row]: the same numbers, bit for bit.

    A block is a float16 scale, for Q4_1 a float16 minimum, then the values. In 4 bits, byte i has
    value i in its low half and value i + 16 in its high half, each one plus 8.
    """
    by_block = blocks.view(len(blocks), -1, BLOCK_TYPES[block_type].block_bytes)
    num_halves = 2 if block_type == "Q4_1" else 1
    halves = by_block[..., : 2 * num_halves].contiguous().view(torch.float16)
    values = by_block[..., 2 * num_halves :]
    if BLOCK_BITS[block_type] == 8:
        values = values.contiguous().view(torch.int8)
    else:
        values = torch.cat([values & 15, values >> 4], -1).view(torch.int8) - 8
    minimums = halves[..., 1].contiguous() if num_halves == 2 else None
    return IntTensor(
        values.flatten(1), halves[..., 0].contiguous(), minimums, BLOCK_BITS[block_type]
    )
