"""The C kernels that read logits, as functions of tensors.

Shapes and layouts are not checked: a wrong one corrupts memory.
"""

import torch

from nanovllm.kernels.cpu import library
from nanovllm.options.sampling_params import GREEDY_BELOW

_CHUNK = 128
"""Logits of a chunk; see csrc/sampling.c."""


def sample(logits: torch.Tensor, *columns: torch.Tensor) -> torch.Tensor:
    """Do what `Kernels.sample` says, or without columns `Kernels.greedy`.

    Args:
        logits: [r, n] of any float dtype.
    """
    if logits.dtype == torch.float16:
        logits = logits.float()
    logits = logits.contiguous()
    rows, n = logits.shape
    out = torch.empty(rows, dtype=torch.int64)
    maxima = torch.empty(rows, -(-n // _CHUNK), dtype=torch.float32)
    sums = scratch = None
    if columns:
        sums = torch.empty_like(maxima)
        scratch = torch.empty(rows, n, dtype=torch.float32)
    bits = 8 * logits.element_size()
    inputs = (logits, bits, *(columns or (None,) * 6))
    library.call("nv_sample", *inputs, maxima, sums, scratch, out, rows, n, GREEDY_BELOW)
    return out


def to_float(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of x, contiguous and bfloat16, in float32."""
    out = torch.empty(x.shape, dtype=torch.float32)
    library.call("nv_to_float", x, out, x.numel())
    return out


def forbid(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    library.call("nv_forbid", logits, rows, masks, *masks.shape, logits.shape[1])
