"""The fused linears with packed weights agree with float64 and compile without spills.

Without a GPU they are interpreted.
"""

import re

import pytest
import torch
from torch.nn.functional import linear, silu

from nanovllm.features.quantization.integer import IntTensor
from nanovllm.kernels.triton import fused_layer
from nanovllm.kernels.triton.packed_ints import empty_ints
from tests.closeness import assert_close
from tests.kernels.triton.harness import SHARED, compile_launches, shapes
from tests.kernels.triton.inputs import CAPABILITY, randn
from tests.kernels.triton.interpreter import patch_interpreter
from tests.kernels.triton.test_compile import meta
from tests.kernels.triton.test_fused_compile import in_child, pointers_read
from tests.kernels.triton.test_int4 import each_dtype, packed, random_weight
from tests.kernels.triton.test_ops import EPS, exact_norm

CHAINED = CAPABILITY >= (9, 0)
BF16 = torch.bfloat16

pytestmark = pytest.mark.usefixtures("inference_mode")
patch_interpreter()


def norm_linear(x, partials, weight, norm, bias, gated):
    return fused_layer.norm_linear(
        x, partials, None, norm, EPS, weight, bias, gated=gated, chained=CHAINED
    )


@each_dtype
@pytest.mark.parametrize(
    ("rows", "case", "gated"),
    [
        (1, (40, 96, 32, "int4"), False),
        (3, (64, 560, 16, "fp4", "factors"), True),
        (16, (66, 1152, 128, "int4", "zeros"), True),
        (5, (33, 1120, 32, "int4", "minimums", "factors"), False),
    ],
    ids=str,
)
def test_norm_linear(rows, case, gated, dtype):
    weight, wide = random_weight(*case)
    outputs, size = wide.shape
    x, partials = randn(rows, size, dtype=dtype) * 3, randn(2, rows, size, seed=1)
    norm = (randn(size, seed=2) / (wide.norm(dim=1).max())).to(dtype)  # outputs of about 1
    bias = randn(outputs, dtype=dtype, seed=3)
    out, total = norm_linear(x, partials, packed(weight), norm, bias, gated)
    assert torch.equal(total, x + (partials[0] + partials[1]).to(dtype))
    # The layers round the norm and its weight, too.
    normed = (exact_norm(total.double(), 1).to(dtype) * norm).double()
    exact = linear(normed, wide, bias.double())
    if gated:
        gate, up = exact.chunk(2, dim=-1)
        exact = silu(gate) * up
    assert_close(out, exact, of_largest=4 * torch.finfo(dtype).eps)


@each_dtype
@pytest.mark.parametrize(
    ("rows", "case", "splits"),
    [
        (1, (40, 96, 32, "int4"), 1),
        (3, (33, 560, 16, "fp4", "factors"), 2),
        (16, (20, 2176, 128, "int4", "zeros"), 3),
    ],
    ids=str,
)
def test_linear_partials(rows, case, splits, dtype):
    weight, wide = random_weight(*case)
    x = randn(rows, wide.shape[1], dtype=dtype)
    partials = fused_layer.linear_partials(x, packed(weight), chained=CHAINED)
    assert partials.shape == (splits, rows, len(wide))
    exact = x.double() @ wide.T
    error = (partials.double().sum(0) - exact).abs()
    assert (error <= 2.0**-16 * (x.double().abs() @ wide.abs().T)).all()


def test_a_row_has_the_same_bits_in_any_batch():
    """In tiles of 16 rows, see test_fused_layer.py; for a GPU see below."""
    weight = packed(random_weight(40, 1152, 128, "int4", "zeros")[0])
    x, partials = randn(16, 1152, dtype=torch.float16), randn(2, 16, 1152, seed=1)
    norm = randn(1152, dtype=torch.float16, seed=2) / 100
    out, _ = norm_linear(x, partials, weight, norm, None, True)
    parts = fused_layer.linear_partials(x, weight, chained=CHAINED)
    for rows in (slice(0, 5), slice(0, 9)):
        some = norm_linear(x[rows], partials[:, rows].contiguous(), weight, norm, None, True)[0]
        assert torch.equal(some, out[rows])
        found = fused_layer.linear_partials(x[rows], weight, chained=CHAINED)
        assert torch.equal(found, parts[:, rows])


def linears(model, rows, group, has_zeros, chained):
    """Launch the four linears of a layer."""
    hidden, intermediate, width = model
    x, norm = meta(rows, hidden, dtype=BF16), meta(hidden, dtype=BF16)
    sums = meta(2, rows, hidden, dtype=torch.float32)

    def weight(outputs, inputs):
        shape = outputs, inputs // group
        zeros = meta(*shape, dtype=torch.int8) if has_zeros else None
        values, scales = meta(outputs, inputs, dtype=torch.int8), meta(*shape, dtype=torch.float16)
        return empty_ints(outputs, IntTensor(values, scales, None, 4, zeros))

    def normed(outputs, gated):
        fused_layer.norm_linear(
            x, sums, None, norm, EPS, weight(outputs, hidden), None, gated=gated, chained=chained
        )

    def partials(inputs):
        inner = meta(rows, inputs, dtype=BF16)
        fused_layer.linear_partials(inner, weight(hidden, inputs), chained=chained)

    normed(width, False)
    partials(width - 2048)  # without k and v
    normed(2 * intermediate, True)
    partials(intermediate)


# hidden size, intermediate size, and the outputs of q, k and v
QWEN3, LLAMA = (1024, 3072, 4096), (4096, 14336, 6144)
NAMES = ["norm_linear_packed", "linear_partials_packed"] * 2


@pytest.mark.parametrize(
    ("model", "rows", "group", "has_zeros", "archs"),
    shapes(
        [(LLAMA, 16, 128, True, [90])],
        [
            (model, rows, group, has_zeros, [arch])
            for model in (QWEN3, LLAMA)
            for rows in (1, 4, 16)
            for group, has_zeros in ((32, False), (128, True))
            for arch in (80, 90, 100)
        ],
    ),
    ids=str,
)
def test_no_spills(model, rows, group, has_zeros, archs):
    call = linears, model, rows, group, has_zeros, archs[0] >= 90
    for arch, kernels in compile_launches(call, archs=archs).items():
        assert [kernel.name for kernel in kernels] == NAMES
        for kernel in kernels:
            assert kernel.n_spills == 0, kernel
            assert kernel.shared <= SHARED[arch] * 1024, kernel


def test_what_is_touched_before_the_wait():
    """Only words: what the previous kernel does not store."""
    codes = in_child("ptx", QWEN3, 1, 128, False, True, 90, function=linears)
    assert len(codes) == 4
    for code, parameters in codes:
        before, wait, _ = code.partition("griddepcontrol.wait")
        assert wait
        assert "griddepcontrol.launch_dependents" in before
        assert not re.search(r"(st|atom|red)\.global|cp\.async", before)
        assert pointers_read(before, parameters) == {"words"}


def test_one_order_of_sums_for_any_number_of_rows():
    """The same threads sum the same squares, and the tensor cores multiply with one instruction."""
    layouts, products = set(), set()
    for rows in (1, 16):
        for code, _ in in_child("ttgir", QWEN3, rows, 128, False, True, 90, function=linears):
            named = dict(re.findall(r"^(#\w+) = (.*)$", code, re.MULTILINE))
            of_sums = re.findall(rf"\}}\) : \(tensor<{rows}x512xf32, (#\w+)>\)", code)
            layouts |= {named[layout] for layout in of_sums}
            products |= set(re.findall(r"warpsPerCTA = (\[.*\]), instrShape = (\[.*\])", code))
    assert len(layouts) == 1
    assert products == {("[8, 1, 1]", "[1, 16, 8]")}
