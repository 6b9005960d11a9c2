"""The fused linears agree with float64 and with the layers. Without a GPU they are interpreted, and
bfloat16 is left out: the interpreter computes it wrongly.
"""

import pytest
import torch
from torch.nn.functional import linear, silu

from nanovllm.kernels.triton import fused_layer
from nanovllm.layers.activation import ActAndMul
from nanovllm.layers.layernorm import RMSNorm
from tests.kernels.triton.inputs import CAPABILITY, each_half, randn
from tests.kernels.triton.interpreter import patch_interpreter
from tests.kernels.triton.test_ops import EPS, assert_as_good, exact_norm

CHAINED = CAPABILITY >= (9, 0)

pytestmark = pytest.mark.usefixtures("inference_mode")
patch_interpreter()


class Case:
    """Random operands of `norm_linear`, with the results of the layers and of float64."""

    def __init__(self, dtype, rows, size, outputs, splits, *, gated=False, biases=False):
        self.x = randn(rows, size, dtype=dtype) * 3
        self.partials = randn(splits, rows, size, seed=1) if splits else None
        self.partials_bias = randn(size, dtype=dtype, seed=2) if splits and biases else None
        self.norm = RMSNorm(size, EPS)
        self.norm.weight.data = randn(size, dtype=dtype, seed=3) + 1
        self.weight = randn(outputs * (1 + gated), size, dtype=dtype, seed=4) * size**-0.5
        self.bias = randn(len(self.weight), dtype=dtype, seed=5) if biases else None
        self.gated = gated
        self.total = self.x
        if splits:
            added = self.partials[0].clone()
            for part in self.partials[1:]:
                added += part
            added = added if self.partials_bias is None else added + self.partials_bias.float()
            self.total = self.x + added.to(dtype)
        self.layers = linear(self.norm(self.total), self.weight, self.bias)
        normed = exact_norm(self.total.double(), self.norm.weight)
        bias = None if self.bias is None else self.bias.double()
        self.exact = linear(normed, self.weight.double(), bias)
        if gated:
            self.layers = ActAndMul()(self.layers)
            gate, up = self.exact.chunk(2, dim=-1)
            self.exact = silu(gate) * up

    def run(self, rows=slice(None)):
        return fused_layer.norm_linear(
            self.x[rows],
            None if self.partials is None else self.partials[:, rows].contiguous(),
            self.partials_bias,
            self.norm.weight,
            EPS,
            self.weight,
            self.bias,
            gated=self.gated,
            chained=CHAINED,
        )


@each_half
@pytest.mark.parametrize(
    ("rows", "size", "outputs", "splits"),
    [(1, 64, 40, 0), (3, 77, 16, 1), (4, 1000, 33, 2), (2, 2100, 18, 3)],
)
@pytest.mark.parametrize("gated", [False, True])
def test_norm_linear(rows, size, outputs, splits, gated, dtype):
    case = Case(dtype, rows, size, outputs, splits, gated=gated, biases=rows != 4)
    out, total = case.run()
    assert torch.equal(total, case.total)  # the layers' order of the sum
    assert_as_good(out, case.layers, case.exact)


@pytest.mark.parametrize("outputs", [40, 70, 128])
@pytest.mark.parametrize("gated", [False, True])
def test_wide_tiles(outputs, gated, monkeypatch):
    """A program computes 32 outputs of a weight with many."""
    monkeypatch.setattr(fused_layer, "PROGRAMS", 1)
    case = Case(torch.float16, 3, 100, outputs, 1, gated=gated, biases=True)
    assert_as_good(case.run()[0], case.layers, case.exact)


@each_half
@pytest.mark.parametrize(
    ("rows", "size", "outputs", "splits"),
    [(1, 64, 40, 1), (3, 77, 33, 1), (4, 1000, 33, 2), (2, 1300, 100, 3)],
)
def test_linear_partials(rows, size, outputs, splits, dtype):
    x, weight = randn(rows, size, dtype=dtype), randn(outputs, size, dtype=dtype, seed=1)
    partials = fused_layer.linear_partials(x, weight, chained=CHAINED)
    assert partials.dtype == torch.float32
    assert partials.shape == (splits, rows, outputs)
    assert_as_good(
        partials.sum(0).to(dtype), linear(x, weight), linear(x.double(), weight.double())
    )


@each_half
def test_a_split_of_many_tiles(dtype, monkeypatch):
    monkeypatch.setattr(fused_layer, "PROGRAMS", 1)
    x, weight = randn(2, 2600, dtype=dtype), randn(20, 2600, dtype=dtype, seed=1)
    partials = fused_layer.linear_partials(x, weight, chained=CHAINED)
    assert len(partials) == 1
    assert_as_good(partials[0].to(dtype), linear(x, weight), linear(x.double(), weight.double()))


def test_a_row_has_the_same_bits_in_any_batch():
    """In tiles of 4 rows: numpy sums in another order if a tile is smaller. For a GPU see
    test_fused_compile.py.
    """
    case = Case(torch.float16, 4, 1100, 40, 2, gated=True)
    out, total = case.run()
    partials = fused_layer.linear_partials(case.x, case.weight, chained=CHAINED)
    for rows in (slice(0, 2), slice(1, 4)):
        ours, ours_total = case.run(rows)
        assert torch.equal(ours, out[rows])
        assert torch.equal(ours_total, total[rows])
        parts = fused_layer.linear_partials(case.x[rows], case.weight, chained=CHAINED)
        assert torch.equal(parts, partials[:, rows])
