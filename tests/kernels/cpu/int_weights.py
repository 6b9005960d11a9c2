"""Random weights of 8 and 4 bits in every form, and their products in float64. Holds no test."""

from typing import NamedTuple

import torch
from hypothesis import strategies as st

from nanovllm.features.quantization.integer import FP4_NUMBERS, IntTensor
from tests.kernels.cpu.helpers import randn

TILE_INPUTS = 32
"""Inputs that share a scale, for weights of 4 bits in groups that are no smaller."""


class Form(NamedTuple):
    """What a weight of 8 or 4 bits has."""

    bits: int
    kind: str  # "plain", "minimums", "zeros", "fp4" or "w8a8"
    group: int | None
    """None: a row."""
    has_factors: bool
    has_order: bool


def forms() -> st.SearchStrategy[Form]:
    """Draw any form that an `IntTensor` allows."""
    any_group = st.sampled_from([32, 64, 96, 128, 256, 512, None])
    rest = st.booleans(), st.booleans()
    return st.one_of(
        st.builds(Form, st.just(8), st.sampled_from(["plain", "zeros", "w8a8"]), any_group, *rest),
        st.builds(Form, st.just(4), st.sampled_from(["plain", "zeros"]), any_group, *rest),
        st.builds(Form, st.just(4), st.just("minimums"), st.just(32), *[st.just(False)] * 2),
        st.builds(Form, st.just(4), st.just("fp4"), st.sampled_from([16, 32, 48, 64, None]), *rest),
    )


def random_weight(form: Form, n: int, k: int, seed: int, extreme: bool = False) -> IntTensor:
    """Return a weight of the given form.

    Args:
        extreme: values and zeros at the ends of their ranges, and scales of all sizes.
    """
    generator = torch.Generator().manual_seed(seed)
    low, high = -(2 ** (form.bits - 1)), 2 ** (form.bits - 1)

    def random(*shape: int, low: int = low, high: int = high) -> torch.Tensor:
        if extreme:
            return (torch.rand(shape, generator=generator) < 0.5).int() * (high - 1 - low) + low
        return torch.randint(low, high, shape, generator=generator)

    groups = k // (form.group or k)
    size = 2.0 ** torch.randint(-12, 13, (n, groups), generator=generator) if extreme else 1.0
    scales = torch.randn(n, groups, generator=generator) * size
    short = scales.bfloat16() if form.kind == "fp4" else scales.half()
    values, zeros = random(n, k), None
    if form.kind == "zeros":  # GPTQ's zero points end one behind those of the values
        zeros = random(n, groups, high=high + (form.bits == 4)).to(torch.int8)
    if extreme:  # the largest sums: of one sign, or a row of E2M1's 6
        values[0] = high - 1 if form.kind != "fp4" else -1
        if zeros is not None:
            zeros[0] = low
    return IntTensor(
        values.to(torch.int8),
        short,
        scales.flip(0).half() if form.kind == "minimums" else None,
        form.bits,
        zeros,
        torch.randn(n, generator=generator) if form.has_factors else None,
        torch.randperm(k, generator=generator).int() if form.has_order else None,
        form.kind == "fp4",
        form.kind == "w8a8",
    )


def dequantised(weight: IntTensor) -> torch.Tensor:
    """Return the weight [n, k] in float64, its columns in the order of `values`."""
    values, groups = weight.values.double(), weight.scales.shape[1]
    if weight.fp4:
        numbers = torch.tensor(FP4_NUMBERS, dtype=torch.float64)
        values = torch.cat([numbers, -numbers])[weight.values.long() + 8]
    grouped = values.view(len(values), groups, -1)
    if weight.minimums is not None:
        grouped = grouped + 8
    if weight.zeros is not None:
        grouped = grouped - weight.zeros.double()[..., None]
    grouped = grouped * weight.scales.double()[..., None]
    if weight.minimums is not None:
        grouped = grouped + weight.minimums.double()[..., None]
    if weight.factors is not None:
        grouped = grouped * weight.factors.double()[:, None, None]
    return grouped.flatten(1)


class Rounded(NamedTuple):
    """Inputs [m, k] as the kernels round them, in float64."""

    values: torch.Tensor
    doubt: torch.Tensor
    """By how much a value may differ: a step, where it is half a step within float32's rounding."""


def rounded_inputs(x: torch.Tensor, weight: IntTensor) -> Rounded:
    """Round x [m, k] bfloat16, to 16 bits for weights of 8 bits and to 8 bits for others."""
    m, k = x.shape
    group, limit = _input_group(weight), 127.0
    if weight.bits == 8 and not weight.short_inputs:
        limit = 32767.0
    grouped = x.float().view(m, k // group, group)
    largest = grouped.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > 0, limit / largest, 0.0)
    steps = (largest / limit).double()
    exact = grouped.double() * inverse.double()
    is_half = ((exact.frac().abs() - 0.5).abs() < 2.0**-22 * limit).double()
    return Rounded((exact.round() * steps).flatten(1), (is_half * steps).flatten(1))


def _input_group(weight: IntTensor) -> int:
    """Return how many inputs share a scale: a divisor of 256, of 32 for 4 bits."""
    group = weight.values.shape[1] // weight.scales.shape[1]
    largest = 256 if weight.bits == 8 else TILE_INPUTS
    return next(size for size in (256, 128, 64, 32, 16) if size <= largest and group % size == 0)


def random_inputs(m: int, k: int, extreme: bool) -> torch.Tensor:
    """Return x [m, k] bfloat16. Extreme: each at an end of its group's range, or of other sizes."""
    x = randn(m, k, seed=m + k)
    if extreme:
        x = x.sign() * 3
        x[1::2] *= randn(len(x[1::2]), k, seed=1) * 1000
        x[2::3, :48] = 0
        x[0], x[-1] = 3, -3
    return x
