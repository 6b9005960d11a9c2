"""The C kernel of LoRA adapters, for a layer in bfloat16. Knows no layer."""

import torch

from nanovllm.kernels.adapters import AdapterRows, AdapterTable
from nanovllm.kernels.cpu import library


def add_lora(y: torch.Tensor, x: torch.Tensor, rows: AdapterRows, table: AdapterTable) -> None:
    """See `kernels.adapters.add_lora`. A token's bits do not depend on the other tokens.

    Recorded calls read `rows` and `table` when they run.

    Args:
        y: contiguous.
        x: its rows may lie apart.
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    sizes = len(x), y.shape[1], x.shape[1], len(table.ends), table.max_rank
    factors = table.a, table.b, table.ranks, table.scales, table.ends
    library.call(
        "nv_add_lora", x, x.stride(0), y, *factors, rows.groups, rows.order, table.scratch, *sizes
    )
