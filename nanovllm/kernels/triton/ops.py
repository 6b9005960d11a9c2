"""The Triton kernels that layers call: norms and activations. `Kernels` says what they do.

The result for a row does not depend on the rest of the batch. The host never waits for the device,
so a CUDA graph can hold every call. Imports triton: see `platform.cuda.triton_available`.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.torch_math import ACTIVATIONS, NORM_CENTRED, NORM_ROUNDED
from nanovllm.kernels.triton.launch import can_chain, join_chain, launch_options
from nanovllm.kernels.triton.states import _softplus

_BLOCK = 1024
"""Numbers that a program processes at once, at most, where they do not depend on one another."""
_ROUNDED = tl.constexpr(NORM_ROUNDED)
_CENTRED = tl.constexpr(NORM_CENTRED)


def add_rms_norm(
    x: torch.Tensor | None,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    kind: int = NORM_ROUNDED,
    multiplier: float = 1.0,
) -> torch.Tensor:
    out = torch.empty_like(residual)
    size = residual.shape[-1]
    _norm_rows(x, residual, weight, out, (size, size), eps, kind, multiplier)
    return out


def add_layer_norm(
    x: torch.Tensor | None,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    out = torch.empty_like(residual)
    size = residual.shape[-1]
    block = triton.next_power_of_2(size)
    if rows := residual.numel() // size:
        _add_layer_norm[(rows,)](
            x, residual, weight, bias, out, size, eps,
            BLOCK=block, num_warps=min(max(block // 256, 1), 16),
            **launch_options(can_chain(out.device)),
        )  # fmt: skip
    return out


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    kind: int = NORM_ROUNDED,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    out = x.new_empty(x.shape) if out is None else out
    assert x.stride(1) == out.stride(1) == 1
    _norm_rows(None, x, weight, out, (x.stride(0), out.stride(0)), eps, kind)
    return out


def _norm_rows(
    x: torch.Tensor | None,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    out: torch.Tensor,
    strides: tuple[int, int],
    eps: float,
    kind: int,
    multiplier: float = 1.0,
) -> None:
    """Launch the norm. `strides` are those between rows of `residual` and of `out`."""
    size = residual.shape[-1]
    block = triton.next_power_of_2(size)
    if rows := residual.numel() // size:
        _add_rms_norm[(rows,)](
            x, residual, weight, out, *strides, size, eps,
            KIND=kind, MULTIPLIER=None if multiplier == 1 else multiplier,
            BLOCK=block, num_warps=min(max(block // 256, 1), 16),
            **launch_options(can_chain(out.device)),
        )  # fmt: skip


def act_and_mul(gate_up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return mul_act(gate, up, activation)


def mul_act(gate: torch.Tensor, x: torch.Tensor, activation: str) -> torch.Tensor:
    assert x.stride(1) == 1
    return _activate(gate, x, x.new_empty(x.shape), activation)


def act(x: torch.Tensor, activation: str) -> torch.Tensor:
    return _activate(x, None, torch.empty_like(x), activation)


def _activate(
    gate: torch.Tensor, x: torch.Tensor | None, out: torch.Tensor, activation: str
) -> torch.Tensor:
    """Write activation(gate) to `out` [T, n], contiguous, times `x` unless that is None."""
    if activation not in (*ACTIVATIONS, "swiglu_oai"):
        raise ValueError(f"activation {activation!r} is none of {', '.join(ACTIVATIONS)}")
    rows, size = out.shape
    assert gate.stride(1) == 1
    block = min(triton.next_power_of_2(size), _BLOCK)
    if rows:
        _mul_act[(rows, triton.cdiv(size, block))](
            gate, x, out, gate.stride(0), 0 if x is None else x.stride(0), size,
            GROUP=size // gate.shape[1], ACTIVATION=activation, BLOCK=block,
            **launch_options(can_chain(out.device)),
        )  # fmt: skip
    return out


@triton.jit
def times_weight(normed, factors, dtype: tl.constexpr, KIND: tl.constexpr):
    """Return float32 numbers `normed` times those of the weight, rounded to `dtype`."""
    if KIND == _ROUNDED:
        normed = normed.to(dtype).to(tl.float32)
    elif KIND == _CENTRED:
        factors = 1.0 + factors
    return (normed * factors).to(dtype)


@triton.jit
def _add_rms_norm(
    x, residual, weight, out, residual_stride, out_stride, size, eps,
    KIND: tl.constexpr, MULTIPLIER: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Process one row. Like torch, round the product, the sum and the norm to the dtype.

    In float32 a GPU may compute the product and the sum by one instruction, which rounds once.
    """
    join_chain(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    dtype = residual.dtype.element_ty
    source = residual + row * residual_stride + columns
    wide = _add_row(x, source, row * size + columns, inside, MULTIPLIER)
    normed = wide * tl.rsqrt(tl.sum(wide * wide) / size + eps)
    if weight is None:
        normed = normed.to(dtype)
    else:
        factors = tl.load(weight + columns, inside, 0.0).to(tl.float32)
        normed = times_weight(normed, factors, dtype, KIND)
    tl.store(out + row * out_stride + columns, normed, inside)


@triton.jit
def _add_row(x, source, places, inside, MULTIPLIER: tl.constexpr):
    """Add the numbers of `x` at `places`, if `x` is given, to those of `source`; return the sums,
    rounded, in float32.
    """
    dtype = source.dtype.element_ty
    wide = tl.load(source, inside, 0.0).to(tl.float32)
    if x is not None:
        added = tl.load(x + places, inside, 0.0).to(tl.float32)
        if MULTIPLIER is not None:
            added = (added * MULTIPLIER).to(dtype).to(tl.float32)
        total = (wide + added).to(dtype)
        tl.store(source, total, inside)
        wide = total.to(tl.float32)
    return wide


@triton.jit
def _add_layer_norm(
    x, residual, weight, bias, out, size, eps, BLOCK: tl.constexpr, CHAINED: tl.constexpr
):  # fmt: skip
    """Process one row: its mean, then the mean square of the differences from it."""
    join_chain(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    places = row * size + columns
    wide = _add_row(x, residual + places, places, inside, None)
    centred = tl.where(inside, wide - tl.sum(wide) / size, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred) / size + eps)
    normed *= tl.load(weight + columns, inside, 0.0).to(tl.float32)
    if bias is not None:
        normed += tl.load(bias + columns, inside, 0.0).to(tl.float32)
    tl.store(out + places, normed.to(out.dtype.element_ty), inside)


@triton.jit
def _activate_and_multiply(gate, up, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
    """Return the activation of `gate`, rounded to `dtype`, times `up`; both are float32.

    "swiglu_oai" is rounded once. Comparisons are such that NaN stays NaN.
    """
    if ACTIVATION == "swiglu_oai":
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        product = gate * tl.sigmoid(1.702 * gate) * (up + 1.0)
    else:
        if ACTIVATION == "silu":
            activated = gate * tl.sigmoid(gate)
        elif ACTIVATION == "gelu_tanh":  # 1 + tanh(y) is 2 sigmoid(2 y)
            inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
            activated = gate * tl.sigmoid(inner)
        elif ACTIVATION == "gelu":
            activated = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
        elif ACTIVATION == "relu":
            activated = tl.where(gate < 0.0, 0.0, gate)
        elif ACTIVATION == "relu2":
            activated = tl.where(gate < 0.0, 0.0, gate * gate)
        elif ACTIVATION == "sigmoid":
            activated = tl.sigmoid(gate)
        elif ACTIVATION == "softplus":
            activated = _softplus(gate)
        else:
            activated = gate
        product = activated.to(dtype).to(tl.float32) * up
    return product.to(dtype)


@triton.jit
def _mul_act(
    gate, x, out, gate_stride, x_stride, size,
    GROUP: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Process one block of a row. A number of the gate is for GROUP of `x`; without x, x is 1."""
    join_chain(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    wide_gate = tl.load(gate + row * gate_stride + columns // GROUP, inside, 0.0).to(tl.float32)
    wide_x = 1.0
    if x is not None:
        wide_x = tl.load(x + row * x_stride + columns, inside, 0.0).to(tl.float32)
    product = _activate_and_multiply(wide_gate, wide_x, out.dtype.element_ty, ACTIVATION)
    tl.store(out + row * size + columns, product, inside)
