"""The Triton kernels of layers with state agree with float64 and with torch, and their bits do not
depend on how tokens are cut into steps. Without a GPU they are interpreted, and bfloat16 is left
out: the interpreter computes it wrongly. They also compile for GPUs that are not present.
"""

import math

import pytest
import torch
from torch.nn.functional import silu

from nanovllm.kernels.states import StatePart, StateRows, States
from nanovllm.kernels.torch_kernels import TORCH
from nanovllm.kernels.triton.kernels import TritonKernels
from tests.kernels.state_cases import (
    exact_delta,
    exact_mamba,
    make_rows,
    make_states,
    naive_conv,
    part_of,
)
from tests.kernels.triton.harness import ARCHS, compile_launches, count_variants
from tests.kernels.triton.inputs import (
    DEVICE,
    EPS,
    assert_as_good,
    each_dtype,
    exact_norm,
    few_dtypes,
    randn,
)
from tests.kernels.triton.interpreter import patch_interpreter
from tests.kernels.triton.test_compile import assert_fits, meta

pytestmark = pytest.mark.usefixtures("inference_mode")
patch_interpreter()
TRITON = TritonKernels()
long = pytest.mark.long
LENGTHS, WRITTEN = [5, 0, 1, 9, 2], [3, 0, 1, 9, 0]
"""Tokens of each row, and after how many of them the state is written."""
PAGES = [[3, 0], [9, 7], [1, 5], [4, 2], [6, 10]]


class Convolution:
    """Random weights and inputs of `causal_conv`, and its exact results."""

    roundings = 1

    def __init__(self, dtype, channels, taps, bias, silu):
        self.parts = [StatePart((taps - 1, channels), dtype)]
        self.inputs = (randn(sum(LENGTHS), channels, dtype=dtype),)
        bias = randn(channels, dtype=dtype, seed=2) if bias else None
        self.fixed = randn(channels, taps, dtype=dtype, seed=1), bias, silu

    def run(self, kernels, inputs, states, rows):
        return kernels.causal_conv(*inputs, *self.fixed, states, rows)

    def exact(self, inputs, parts):
        out, kept = naive_conv(*inputs, *self.fixed, parts[0])
        return out, [kept]


class Delta:
    """Random inputs of `gated_delta`, and its exact results."""

    roundings = 8  # torch adds up in trees

    def __init__(
        self, dtype, key_heads, value_heads, key_dim, value_dim, *, by_key=False, bound=None
    ):
        state = StatePart((key_dim, value_dim), torch.float32)
        self.parts = [StatePart((3, 4), dtype), *[state] * value_heads]
        width = 2 * key_heads * key_dim + value_heads * value_dim
        decays = value_heads * (key_dim if by_key else 1)
        gates = randn(sum(LENGTHS), 3 + decays + value_heads, dtype=dtype, seed=1) * 3
        a, b = gates[:, 3:].split([decays, value_heads], dim=1)
        self.inputs = randn(sum(LENGTHS), width, dtype=dtype), a, b
        self.fixed = randn(value_heads, seed=2), randn(decays, seed=3) - 2
        self.bound = bound

    def run(self, kernels, inputs, states, rows):
        return kernels.gated_delta(*inputs, *self.fixed, states, rows, self.bound)

    def exact(self, inputs, parts):
        out, known = exact_delta((*inputs, *self.fixed), torch.stack(parts[1:]), self.bound)
        return out, [parts[0], *known[-1]]


class Mamba2:
    """Random inputs of `mamba2`, and its exact results."""

    roundings = 8

    def __init__(self, dtype, groups, heads, state_dim, head_dim, limits=(0.0, math.inf)):
        state = StatePart((state_dim, head_dim), torch.float32)
        self.parts = [StatePart((3, 4), dtype), *[state] * heads]
        width = heads * head_dim + 2 * groups * state_dim
        steps = randn(sum(LENGTHS), heads + 3, dtype=dtype, seed=1) * 3
        self.inputs = randn(sum(LENGTHS), width, dtype=dtype), steps[:, 3:]
        self.fixed = randn(heads, seed=2), randn(heads, seed=3), randn(heads, seed=4) - 2, limits

    def run(self, kernels, inputs, states, rows):
        return kernels.mamba2(*inputs, *self.fixed, states, rows)

    def exact(self, inputs, parts):
        *fixed, limits = self.fixed
        out, known = exact_mamba((*inputs, *fixed), limits, torch.stack(parts[1:]))
        return out, [parts[0], *known[-1]]


def states_of(case):
    """Return random states, two pages a row."""
    pool, places, parts = make_states(case.parts, 11, 2)
    states = States(pool.to(DEVICE), places.to(DEVICE), parts)
    for pages in PAGES:
        for index, part in enumerate(parts):
            numbers = randn(*part.shape, dtype=part.dtype, seed=9 * pages[0] + index)
            part_of(states, pages, index).copy_(numbers)
    return states


def rows_of(pages, lengths, written):
    """Return rows whose pages are the last columns of a wider table."""
    rows = make_rows(pages, lengths, written)
    table = torch.nn.functional.pad(rows.pages, (3, 0), value=-1).to(DEVICE)
    return StateRows(table[:, 3:], rows.cu_seqlens.to(DEVICE), rows.write_lens.to(DEVICE))


def check_against_float64(case):
    """Check results and states of rows in one step, and that nothing else in the pool changes."""
    before, ours, torchs = states_of(case), states_of(case), states_of(case)
    rows = rows_of(PAGES, LENGTHS, WRITTEN)
    found = case.run(TRITON, case.inputs, ours, rows).split(LENGTHS)
    expected = case.run(TORCH, case.inputs, torchs, rows).split(LENGTHS)
    inputs = zip(*(x.split(LENGTHS) for x in case.inputs), strict=True)
    for pages, written, out, torch_out, row in zip(
        PAGES, WRITTEN, found, expected, inputs, strict=True
    ):
        old = [part_of(before, pages, index) for index in range(len(case.parts))]
        if len(out):
            assert_as_good(out, torch_out, case.exact(row, old)[0], case.roundings)
        exact = case.exact([x[:written] for x in row], old)[1] if written else old
        for index, part in enumerate(exact):
            ours_part, torch_part = (part_of(x, pages, index) for x in (ours, torchs))
            assert_as_good(ours_part, torch_part, part.double(), case.roundings)
            ours_part.copy_(old[index])
    assert torch.equal(ours.pool, before.pool)


def check_bits(case, size):
    """Check that rows cut into steps of `size` tokens, each row on its own, give the same bits. And
    that those do not change if the rest of the row follows as drafts, which change no state.
    """
    whole, cut, drafted = states_of(case), states_of(case), states_of(case)
    expected = case.run(TRITON, case.inputs, whole, rows_of(PAGES, LENGTHS, LENGTHS))
    row_end = 0
    for pages, length in zip(PAGES, LENGTHS, strict=True):
        row_end += length
        for start in range(row_end - length, row_end, size):
            end = min(start + size, row_end)
            for states, until in ((cut, end), (drafted, row_end)):
                rows = rows_of([pages], [until - start], [end - start])
                out = case.run(TRITON, [x[start:until] for x in case.inputs], states, rows)
                assert torch.equal(out, expected[start:until])
    assert torch.equal(cut.pool, whole.pool)
    assert torch.equal(drafted.pool, whole.pool)


@pytest.mark.thinned(5)
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@each_dtype
@pytest.mark.parametrize(
    ("channels", "taps", "bias", "silu"),
    [(130, 4, False, True), (7, 2, True, True), (2, 12, True, False)],
)
def test_causal_conv(channels, taps, bias, silu, dtype):
    case = Convolution(dtype, channels, taps, bias, silu)
    check_against_float64(case)
    check_bits(case, min(taps - 1, 3))


@few_dtypes
@pytest.mark.parametrize(
    ("key_heads", "value_heads", "key_dim", "value_dim"), [(2, 4, 20, 12), (1, 1, 100, 12)]
)
def test_gated_delta(key_heads, value_heads, key_dim, value_dim, dtype):
    case = Delta(dtype, key_heads, value_heads, key_dim, value_dim)
    check_against_float64(case)
    check_bits(case, 4)


@few_dtypes
@pytest.mark.parametrize("bound", [None, -5.0])
def test_delta_rule_with_a_decay_for_each_row_of_the_state(bound, dtype):
    case = Delta(dtype, 2, 2, 20, 12, by_key=True, bound=bound)
    check_against_float64(case)
    check_bits(case, 4)


@pytest.mark.thinned(2)
@few_dtypes
@pytest.mark.parametrize(
    ("groups", "heads", "state_dim", "head_dim", "limits"),
    [(2, 4, 20, 12, (0.0, math.inf)), (1, 2, 128, 12, (0.1, 1.0))],
)
def test_mamba2(groups, heads, state_dim, head_dim, limits, dtype):
    case = Mamba2(dtype, groups, heads, state_dim, head_dim, limits)
    check_against_float64(case)
    check_bits(case, 4)


def test_no_tokens():
    for case, shape in (
        (Convolution(torch.float32, 9, 4, False, True), (0, 9)),
        (Delta(torch.float32, 1, 2, 8, 8), (0, 2, 8)),
        (Mamba2(torch.float32, 1, 2, 8, 8), (0, 2, 8)),
    ):
        states, rows = states_of(case), rows_of(PAGES, [0] * 5, [0] * 5)
        assert case.run(TRITON, [x[:0] for x in case.inputs], states, rows).shape == shape
        assert torch.equal(states.pool, states_of(case).pool)


def test_many_rows():
    """A program of the convolution finds its row among more than it reads at once."""
    num_rows = 66
    states = make_states([StatePart((1, 3), torch.float32)], num_rows, 1)
    states = States(states.pool.to(DEVICE), states.places.to(DEVICE), states.parts)
    torchs = states._replace(pool=states.pool.clone())
    rows = rows_of([[row] for row in range(num_rows)], [1] * num_rows, None)
    x, weight = randn(num_rows, 3), torch.ones(3, 2, device=DEVICE)
    ours = TRITON.causal_conv(x, weight, None, False, states, rows)
    assert torch.equal(ours, TORCH.causal_conv(x, weight, None, False, torchs, rows))
    for row in range(num_rows):
        assert torch.equal(part_of(states, [row], 0), x[row : row + 1])


@each_dtype
@pytest.mark.parametrize(("rows", "size"), [(0, 32), (1, 128), (50, 72)])
def test_gated_rms_norm(rows, size, dtype):
    """The rows lie apart. A row's bits do not depend on the others."""
    x, gate = randn(rows, 2 * size, dtype=dtype).chunk(2, dim=1)
    weight = randn(size, dtype=dtype, seed=1)
    out = TRITON.gated_rms_norm(x, gate, weight, EPS)
    normed = exact_norm(x.double(), weight.double())
    exact = normed * silu(gate.double())
    torchs = TORCH.gated_rms_norm(x, gate, weight, EPS)
    assert_as_good(out, torchs, exact)
    others = (
        kernels.gated_rms_norm(x, gate, weight, EPS, sigmoid=True) for kernels in (TRITON, TORCH)
    )
    assert_as_good(*others, normed * gate.double().sigmoid())
    for row in range(0, rows, 7):
        alone = TRITON.gated_rms_norm(x[row : row + 1], gate[row : row + 1], weight, EPS)
        assert torch.equal(alone, out[row : row + 1])
    assert torch.equal(TRITON.gated_rms_norm(x[None], gate[None], weight, EPS), out[None])
    # Rows that begin elsewhere may be loaded otherwise, and summed in another order.
    close = TRITON.gated_rms_norm(x.contiguous(), gate.contiguous(), weight, EPS)
    assert_as_good(close, torchs, exact)


@each_dtype
@pytest.mark.parametrize("gate_first", [False, True])
def test_gated_rms_norm_of_groups(gate_first, dtype):
    """Each of three groups has its own weight, and the gate comes before the norm or after it."""
    x, gate = randn(2, 9, 3, 40, dtype=dtype)
    weight = randn(3, 40, dtype=dtype, seed=1)
    out = TRITON.gated_rms_norm(x, gate, weight, EPS, gate_first)
    opened = silu(gate.double())
    before, after = (opened, 1.0) if gate_first else (1.0, opened)
    exact = exact_norm(x.double() * before, weight.double()) * after
    assert_as_good(out, TORCH.gated_rms_norm(x, gate, weight, EPS, gate_first), exact)
    assert torch.equal(TRITON.gated_rms_norm(x[4:5], gate[4:5], weight, EPS, gate_first)[0], out[4])


def launch_layer(key_heads, value_heads, dtype):
    """Launch the operations of a layer with heads of 128."""
    channels = (2 * key_heads + value_heads) * 128
    state = StatePart((128, 128), torch.float32)
    states, rows = meta_states([StatePart((3, channels), dtype), *[state] * value_heads])
    x, gates = meta(5, channels, dtype=dtype), meta(5, 2 * value_heads, dtype=dtype)
    heads = meta(value_heads, dtype=torch.float32)
    TRITON.causal_conv(x, meta(channels, 4, dtype=dtype), None, True, states, rows)
    TRITON.gated_delta(x, *gates.chunk(2, 1), heads, heads, states, rows)
    outputs = meta(5 * value_heads, 128, dtype=dtype)
    TRITON.gated_rms_norm(outputs, outputs, meta(128, dtype=dtype), EPS)


def launch_kimi_delta(heads, bound, dtype):
    """Launch the recurrence of a layer with heads of 128, and its gated norm."""
    state = StatePart((128, 128), torch.float32)
    states, rows = meta_states([StatePart((3, 3 * heads * 128), dtype), *[state] * heads])
    x, gates = meta(5, 3 * heads * 128, dtype=dtype), meta(5, heads * 129, dtype=dtype)
    a, b = gates.split([heads * 128, heads], dim=1)
    logs, shifts = (meta(size, dtype=torch.float32) for size in (heads, heads * 128))
    TRITON.gated_delta(x, a, b, logs, shifts, states, rows, bound)
    outputs = meta(5, heads, 128, dtype=dtype)
    TRITON.gated_rms_norm(outputs, outputs, meta(128, dtype=dtype), EPS, sigmoid=True)


def launch_mamba2(groups, heads, state_dim, dtype):
    """Launch the operations of a layer with heads of 64."""
    channels = heads * 64 + 2 * groups * state_dim
    state = StatePart((state_dim, 64), torch.float32)
    states, rows = meta_states([StatePart((3, channels), dtype), *[state] * heads])
    x, bias = meta(5, channels, dtype=dtype), meta(channels, dtype=dtype)
    TRITON.causal_conv(x, meta(channels, 4, dtype=dtype), bias, True, states, rows)
    of_heads = [meta(heads, dtype=torch.float32) for _ in range(3)]
    steps = meta(5, heads + 8, dtype=dtype)[:, 8:]
    TRITON.mamba2(x, steps, *of_heads, (0.0, math.inf), states, rows)
    outputs = meta(5, groups, heads * 64 // groups, dtype=dtype)
    weight = meta(groups, heads * 64 // groups, dtype=dtype)
    TRITON.gated_rms_norm(outputs, outputs, weight, EPS, True)


def meta_states(parts):
    places = meta(len(parts), 2, dtype=torch.int64)
    states = States(meta(99, 2**17, dtype=torch.uint8), places, tuple(parts))
    pages, ends, written = (meta(*n, dtype=torch.int32) for n in ((3, 9), (4,), (3,)))
    return states, StateRows(pages, ends, written)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=long)])
def test_they_compile_for_other_gpus(dtype):
    """At the shapes of Qwen3.5-4B."""
    compiled = compile_launches((launch_layer, 16, 32, dtype), archs=ARCHS)
    assert_fits(compiled, "_causal_conv", "_gated_delta", "_gated_rms_norm")


def test_kimi_delta_attention_compiles():
    """At the shape of Kimi-Linear, on two ranks; and bounded."""
    compiled = compile_launches((launch_kimi_delta, 16, -5.0, torch.bfloat16))
    assert_fits(compiled, "_gated_delta", "_gated_rms_norm")


def test_mamba2_compiles():
    """At the shapes of Nemotron Nano 4B."""
    compiled = compile_launches((launch_mamba2, 8, 96, 128, torch.bfloat16))
    assert_fits(compiled, "_causal_conv", "_mamba2", "_gated_rms_norm")


def launch_steps(dtype):
    """Launch the operations for steps of several sizes."""
    for rows, tokens in ((1, 1), (1, 16), (3, 20), (16, 16)):
        case = Delta(dtype, 1, 2, 16, 16)
        states = make_states(case.parts, 2, 2)
        step = rows_of([[0, 1]] * rows, [tokens // rows] * rows, None)
        case.run(TRITON, [x.repeat(2, 1)[:tokens] for x in case.inputs], states, step)
        case = Mamba2(dtype, 1, 2, 16, 16)
        states = make_states(case.parts, 2, 2)
        case.run(TRITON, [x.repeat(2, 1)[:tokens] for x in case.inputs], states, step)
        conv = Convolution(dtype, 16, 4, False, True)
        x = torch.zeros(tokens, 16, dtype=dtype)
        conv.run(TRITON, [x], make_states(conv.parts, 2, 2), step)
        TRITON.gated_rms_norm(x, x, torch.zeros(16, dtype=dtype), EPS)


def test_steps_of_all_sizes_compile_one_variant():
    variants = count_variants(launch_steps, torch.bfloat16)
    names = "_causal_conv", "_gated_delta", "_gated_rms_norm", "_mamba2"
    assert variants == dict.fromkeys(names, 1)
