"""What the C kernels compute in a layer with state, as functions of tensors in bfloat16.

`Kernels` says what they do. Knows no layer and no model. Shapes and layouts are not checked: a
wrong one corrupts memory.
"""

import torch

from nanovllm.attention.states import StateRows, States
from nanovllm.kernels.cpu import library


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
    states: States,
    rows: StateRows,
) -> torch.Tensor:
    """The rows of `x` may lie apart."""
    out = torch.empty(x.shape, dtype=x.dtype)
    sizes = len(rows.write_lens), *weight.shape, silu
    library.call(
        "nv_causal_conv", x, x.stride(0), weight, bias, out, *_places(states, rows), *sizes
    )
    return out


def gated_delta(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: States,
    rows: StateRows,
) -> torch.Tensor:
    num_heads, (dk, dv) = len(a_log), states.parts[1].shape
    key_heads = (qkv.shape[1] - num_heads * dv) // (2 * dk)
    out = torch.empty(len(qkv), num_heads, dv, dtype=qkv.dtype)
    gates = a, a.stride(0), b, b.stride(0), a_log, dt_bias
    sizes = len(rows.write_lens), key_heads, num_heads, dk, dv
    library.call("nv_gated_delta", qkv, *gates, out, *_places(states, rows), *sizes)
    return out


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Only [T, heads, D] can be recorded for T tokens."""
    out = torch.empty(x.shape, dtype=x.dtype)
    tokens, size = len(x), x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    inputs = x, x.stride(0), gate, gate.stride(0), weight
    library.call("nv_gated_rms_norm", *inputs, out, tokens, heads, size, eps)
    return out


def _places(states: States, rows: StateRows) -> tuple[torch.Tensor | int, ...]:
    """Return the arguments of a kernel that say where the states are."""
    pool, pages = states.pool, rows.pages
    pages_of_rows = pages, pages.shape[1], rows.cu_seqlens, rows.write_lens
    return pool, pool.stride(0), states.places, *pages_of_rows
