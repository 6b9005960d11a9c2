"""The operations of layers with state in plain torch, against loops in float64."""

import functools

import pytest
import torch
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

from nanovllm.kernels.states import StatePart
from nanovllm.kernels.torch_kernels import TORCH
from tests.closeness import assert_close
from tests.kernels.state_cases import (
    make_rows,
    make_states,
    naive_conv,
    naive_delta,
    naive_mamba2,
    part_of,
)

PAGES = [[3, 0], [1, 5], [4, 2]]
LENGTHS = [5, 1, 9]
CUTS = [[[5, 1, 9]], [[1, 1, 4], [4, 0, 5]], [[2, 0, 2], [2, 0, 2], [1, 1, 5]]]
"""Steps of the same rows: the tokens of each. A row without tokens is not in the step."""


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def conv_case(dtype: torch.dtype, taps: int = 4, channels: int = 10):
    states = make_states([StatePart((taps - 1, channels), dtype)], 6, 2)
    for pages in PAGES:
        part_of(states, pages, 0).copy_(randn(taps - 1, channels, seed=pages[0]))
    x = randn(sum(LENGTHS), channels, dtype=dtype)
    return states, x, randn(channels, taps, dtype=dtype, seed=1), randn(channels, seed=2).to(dtype)


def delta_case(dtype: torch.dtype, key_heads: int = 2, heads: int = 4, *, by_rows: bool = False):
    """Return states and the inputs of a gated delta rule; by_rows: each row has its own decay."""
    dk, dv = 6, 5
    conv = StatePart((3, 2 * key_heads * dk + heads * dv), dtype)
    states = make_states([conv, *[StatePart((dk, dv), torch.float32)] * heads], 6, 2)
    for pages in PAGES:
        for head in range(heads):
            part_of(states, pages, 1 + head).copy_(randn(dk, dv, seed=pages[0] + 10 * head))
    tokens = sum(LENGTHS)
    qkv = randn(tokens, conv.shape[1], dtype=dtype)
    width = heads * (dk if by_rows else 1)
    gates = randn(tokens, width + 2 * heads, dtype=dtype, seed=1)
    a, b = gates[:, :width], gates[:, -heads:]
    return states, (qkv, a, b, randn(heads, seed=2), randn(width, seed=3))


def mamba_case(dtype: torch.dtype, groups: int = 2, heads: int = 4, n: int = 6, p: int = 5):
    conv = StatePart((3, heads * p + 2 * groups * n), dtype)
    states = make_states([conv, *[StatePart((n, p), torch.float32)] * heads], 6, 2)
    for pages in PAGES:
        for head in range(heads):
            part_of(states, pages, 1 + head).copy_(randn(n, p, seed=pages[0] + 10 * head))
    tokens = sum(LENGTHS)
    xbc = randn(tokens, conv.shape[1], dtype=dtype)
    dt = randn(tokens, 2 * heads, dtype=dtype, seed=1)[:, heads:]
    return states, (xbc, dt, *(randn(heads, seed=seed) for seed in (2, 3, 4)))


def run_in_steps(function, states, inputs, steps, pages=PAGES, lengths=LENGTHS):
    """Return the outputs of all tokens, computed in `steps`, in the order of one step."""
    starts = [sum(lengths[:row]) for row in range(len(lengths))]
    done = [0] * len(lengths)
    results = {}
    for step in steps:
        rows = [row for row, count in enumerate(step) if count]
        tokens = [starts[row] + done[row] + i for row in rows for i in range(step[row])]
        part = make_rows([pages[row] for row in rows], [step[row] for row in rows])
        out = function(*(x[tokens] for x in inputs), states, part)
        results |= dict(zip(tokens, out, strict=True))
        done = [old + new for old, new in zip(done, step, strict=True)]
    return torch.stack([results[token] for token in range(sum(lengths))])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("taps", [2, 3, 4])
def test_convolution(dtype, silu, taps) -> None:
    states, x, weight, bias = conv_case(dtype, taps)
    for given in (None, bias):
        kept = [part_of(states, pages, 0).clone() for pages in PAGES]
        found = TORCH.causal_conv(x, weight, given, silu, states, make_rows(PAGES, LENGTHS))
        tolerance = 2**-8 if dtype == torch.bfloat16 else 1e-6
        assert found.dtype == dtype
        for part, pages, old in zip(x.split(LENGTHS), PAGES, kept, strict=True):
            expected, left = naive_conv(part, weight, given, silu, old)
            out, found = found[: len(part)], found[len(part) :]
            assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
            assert torch.equal(part_of(states, pages, 0).double(), left)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "by_rows", "bound"),
    [
        *[(heads, False, None) for heads in [(1, 1), (2, 4), (3, 3), (1, 4)]],
        *[((3, 3), True, None), ((2, 2), True, -5.0)],
    ],
    ids=str,
)
def test_delta_rule(dtype, heads, by_rows, bound) -> None:
    states, (qkv, a, b, *gates) = delta_case(dtype, *heads, by_rows=by_rows)
    before = [
        torch.stack([part_of(states, pages, 1 + head).clone() for head in range(heads[1])])
        for pages in PAGES
    ]
    found = TORCH.gated_delta(qkv, a, b, *gates, states, make_rows(PAGES, LENGTHS), bound)
    assert found.dtype == dtype
    tolerance = 2**-8 if dtype == torch.bfloat16 else 2e-6
    parts = (x.split(LENGTHS) for x in (qkv, a, b, found))
    for (*inputs, out), pages, old in zip(zip(*parts, strict=True), PAGES, before, strict=True):
        expected, state = naive_delta(*inputs, *gates, old, bound)
        assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
        for head, values in enumerate(state):
            found_state = part_of(states, pages, 1 + head).double()
            assert_close(found_state, values, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("limits", [(0.0, torch.inf), (0.3, 1.5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(1, 1), (2, 4), (3, 3)], ids=str)
def test_mamba2(dtype, heads, limits) -> None:
    states, (xbc, dt, *fixed) = mamba_case(dtype, *heads)
    before = [
        torch.stack([part_of(states, pages, 1 + head).clone() for head in range(heads[1])])
        for pages in PAGES
    ]
    found = TORCH.mamba2(xbc, dt, *fixed, limits, states, make_rows(PAGES, LENGTHS))
    assert found.dtype == dtype
    tolerance = 2**-8 if dtype == torch.bfloat16 else 2e-6
    parts = (x.split(LENGTHS) for x in (xbc, dt, found))
    for (*inputs, out), pages, old in zip(zip(*parts, strict=True), PAGES, before, strict=True):
        expected, state = naive_mamba2(*inputs, *fixed, limits, old)
        assert_close(out.double(), expected, atol=4 * tolerance, rtol=tolerance)
        for head, values in enumerate(state):
            assert_close(part_of(states, pages, 1 + head).double(), values, atol=4e-6, rtol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps", CUTS[1:], ids=["two steps", "three steps"])
def test_cuts_change_no_bit(dtype, steps) -> None:
    def pools(make, call):
        found = []
        for cut in (CUTS[0], steps):
            states, *inputs = make(dtype)
            found.append((call(states, inputs, cut), states.pool))
        return found

    def conv(states, inputs, cut):
        x, weight, bias = inputs
        apply = lambda x, *where: TORCH.causal_conv(x, weight, bias, True, *where)  # noqa: E731
        return run_in_steps(apply, states, [x], cut)

    def delta(states, inputs, cut):
        (qkv, a, b, *gates), apply = inputs[0], TORCH.gated_delta
        return run_in_steps(
            lambda qkv, a, b, *where: apply(qkv, a, b, *gates, *where), states, [qkv, a, b], cut
        )

    def mamba(states, inputs, cut):
        (xbc, dt, *fixed), limits = inputs[0], (0.0, 2.0)
        apply = lambda xbc, dt, *where: TORCH.mamba2(xbc, dt, *fixed, limits, *where)  # noqa: E731
        return run_in_steps(apply, states, [xbc, dt], cut)

    by_rows = functools.partial(delta_case, by_rows=True)
    layers = ((conv_case, conv), (delta_case, delta), (by_rows, delta), (mamba_case, mamba))
    for make, call in layers:
        (whole, whole_pool), (cut, cut_pool) = pools(make, call)
        assert torch.equal(whole, cut)
        assert torch.equal(whole_pool, cut_pool)


def test_the_state_is_written_after_some_tokens() -> None:
    """Also: nothing but the parts of these rows changes."""
    written, lengths = [4, 0, 9], LENGTHS
    states, x, weight, bias = conv_case(torch.float32)
    pool = states.pool.clone()
    expected = [
        naive_conv(part[:count], weight, bias, True, part_of(states, pages, 0))[1]
        if count
        else part_of(states, pages, 0).double()
        for part, count, pages in zip(x.split(lengths), written, PAGES, strict=True)
    ]
    TORCH.causal_conv(x, weight, bias, True, states, make_rows(PAGES, lengths, written))
    for pages, left in zip(PAGES, expected, strict=True):
        assert torch.equal(part_of(states, pages, 0).double(), left)
        part_of(states, pages, 0).zero_()
        part_of(states._replace(pool=pool), pages, 0).zero_()
    # What follows a part up to the next multiple of 64 bytes is nobody's.
    assert states.parts[0].nbytes == 120
    for found in (states.pool, pool):
        found.view(6, -1, 64)[:, 2, 56:] = 0
    assert torch.equal(states.pool, pool)

    states, (qkv, a, b, *gates) = delta_case(torch.float32)
    again, _ = delta_case(torch.float32)
    TORCH.gated_delta(qkv, a, b, *gates, states, make_rows(PAGES, lengths, written))
    tokens = [*range(4), *range(6, 15)]  # the others are never written
    rows = make_rows([PAGES[0], PAGES[2]], [4, 9])
    TORCH.gated_delta(qkv[tokens], a[tokens], b[tokens], *gates, again, rows)
    assert torch.equal(states.pool, again.pool)

    states, (xbc, dt, *fixed) = mamba_case(torch.float32)
    again, _ = mamba_case(torch.float32)
    limits = 0.0, 2.0
    TORCH.mamba2(xbc, dt, *fixed, limits, states, make_rows(PAGES, lengths, written))
    TORCH.mamba2(xbc[tokens], dt[tokens], *fixed, limits, again, rows)
    assert torch.equal(states.pool, again.pool)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_norm(dtype) -> None:
    reference = Qwen3_5RMSNormGated(24, eps=1e-5).to(dtype)
    reference.weight.data = randn(24, dtype=dtype, seed=1)
    x, gate = randn(7, 24, dtype=dtype, seed=2), randn(7, 24, dtype=dtype, seed=3)
    found = TORCH.gated_rms_norm(x, gate, reference.weight.data, 1e-5)
    tolerance = 2**-8 if dtype == torch.bfloat16 else 1e-6
    assert_close(found, reference(x, gate).detach(), atol=0.0, rtol=tolerance)
    heads = TORCH.gated_rms_norm(x[None], gate[None], reference.weight.data, 1e-5)
    assert torch.equal(heads, found[None])
    other = KimiLinearRMSNormGated(24, eps=1e-5)
    other.weight.data = reference.weight.data
    found = TORCH.gated_rms_norm(x, gate, other.weight.data, 1e-5, sigmoid=True)
    assert_close(found, other(x, gate).detach(), atol=0.0, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_norm_behind_a_gate(dtype) -> None:
    reference = MambaRMSNormGated(24, 8, eps=1e-5).to(dtype)
    reference.weight.data = randn(24, dtype=dtype, seed=1)
    x, gate = randn(7, 24, dtype=dtype, seed=2), randn(7, 24, dtype=dtype, seed=3)
    groups = [each.unflatten(-1, (3, 8)) for each in (x, gate, reference.weight.data)]
    found = TORCH.gated_rms_norm(*groups, 1e-5, gate_first=True)
    tolerance = 2**-8 if dtype == torch.bfloat16 else 1e-6
    assert_close(found.flatten(1), reference(x, gate).detach(), atol=0.0, rtol=tolerance)
    plain = TORCH.gated_rms_norm(*groups, 1e-5)
    for group in range(3):
        alone = (each[..., group, :] for each in groups)
        assert torch.equal(plain[:, group], TORCH.gated_rms_norm(*alone, 1e-5))
