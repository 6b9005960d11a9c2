"""The common form of weights in few bits: which scales it holds exactly, and its rows in torch."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from nanovllm.features.quantization.integer import IntRows, IntWeight, int_tensor
from nanovllm.kernels.torch_kernels import TORCH
from tests.kernels.cpu.helpers import make_int_method
from tests.kernels.cpu.int_weights import dequantised, forms, random_weight

pytestmark = pytest.mark.usefixtures("inference_mode")


def random_values(n, k, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 8, (n, k), generator=generator, dtype=torch.int8)


def scaled(values, scales):
    return values.double() * scales.double().repeat_interleave(values.shape[1] // len(scales.T), 1)


@settings(max_examples=60, deadline=None)
@given(
    exponents=st.lists(st.integers(-60, 60), min_size=3, max_size=3),
    bits=st.integers(1, 24),
    groups=st.sampled_from([1, 4]),
    has_factors=st.booleans(),
)
def test_scales_are_exact_or_refused(exponents, bits, groups, has_factors):
    """Each row has scales of one size, whose significands have `bits`."""
    values = random_values(3, 128)
    generator = torch.Generator().manual_seed(bits)
    significands = torch.randint(2 ** (bits - 1), 2**bits, (3, groups), generator=generator)
    powers = torch.tensor(exponents)[:, None] - bits
    scales = torch.ldexp(significands.float(), powers)
    factors = torch.tensor([0.5, 2.0, -4.0]) if has_factors else None
    found = int_tensor(values, scales, 4, factors=factors)
    assert (found is None) == (bits > 11 and groups > 1 and not is_short(scales))
    if found is None:
        return
    factor = 1 if factors is None else factors.double()[:, None]
    assert torch.equal(dequantised(found), scaled(values, scales) * factor)
    assert (found.factors is factors) == is_short(scales)


def is_short(scales):
    return torch.equal(scales.half().float(), scales)


def test_a_row_may_have_any_scale():
    scales = torch.tensor([[0.0], [2.0**-140], [torch.nan], [1 / 3]])
    found = int_tensor(random_values(4, 64), scales, 4)
    assert found.scales.tolist() == [[1]] * 4
    assert torch.equal(found.factors.nan_to_num(7), scales[:, 0].nan_to_num(7))


def test_a_row_may_have_scales_of_all_of_float16s_range():
    scales = torch.tensor([[2.0**-24, 65504.0], [2.0**-30, 2.0**9], [2.0**-30, 2.0**11]])
    assert int_tensor(random_values(1, 64), scales[:1], 4).factors is None
    found = int_tensor(random_values(2, 64), scales[:2], 4)
    assert found.factors.tolist() == [1, 2.0**-6]
    assert int_tensor(random_values(3, 64), scales, 4) is None
    assert int_tensor(random_values(1, 64), torch.full((1, 2), 2.0**-140), 4) is None


def test_scales_of_e2m1_are_those_of_bfloat16():
    values = random_values(2, 64)
    every_e4m3 = torch.arange(127).to(torch.uint8).view(torch.float8_e4m3fn).float()
    found = int_tensor(random_values(1, 127 * 16), every_e4m3[None], 4, fp4=True)
    assert torch.equal(found.scales.float(), every_e4m3[None])
    ends = torch.tensor([[2.0**-127, 2.0**127], [1.0, torch.nan]])  # of E8M0
    found = int_tensor(values, ends, 4, fp4=True)
    assert found.scales.dtype == torch.bfloat16
    assert torch.equal(found.scales.float().nan_to_num(7), ends.nan_to_num(7))
    assert int_tensor(values, ends + 2.0**-7, 4, fp4=True) is not None
    assert int_tensor(values, torch.full((2, 2), 1 + 2.0**-9), 4, fp4=True) is None


@pytest.mark.parametrize(("bits", "last"), [(4, 119), (8, 127)])
def test_zeros_must_fit(bits, last):
    values, scales = random_values(2, 64), torch.ones(2, 2)
    zeros = torch.tensor([[-128, 0], [1, last]])
    found = int_tensor(values, scales, bits, zeros=zeros)
    assert torch.equal(found.zeros, zeros.to(torch.int8))
    assert int_tensor(values, scales, bits, zeros=zeros + (zeros == last)) is None
    assert int_tensor(values, scales, bits, zeros=zeros - 1) is None


def test_groups_must_be_whole_tiles():
    assert int_tensor(random_values(2, 96), torch.ones(2, 2), 4) is None
    assert int_tensor(random_values(2, 96), torch.ones(2, 2), 4, fp4=True) is not None
    assert int_tensor(random_values(2, 96), torch.ones(2, 12), 4, fp4=True) is None
    assert int_tensor(random_values(2, 100), torch.ones(2, 3), 4) is None


def test_what_is_no_number_stays_so():
    scales = torch.tensor([[1.0, torch.nan], [torch.inf, 2.0**-40], [1.0, 2.0]])
    found = int_tensor(random_values(3, 64), scales, 4)
    assert found.scales.isfinite().tolist() == [[True, False], [False, True], [True, True]]
    assert dequantised(found)[0, 32:].isnan().all()


@settings(max_examples=40, deadline=None)
@given(form=forms(), seed=st.integers(0, 100), extreme=st.booleans())
def test_torch_multiplies_by_the_weight(form, seed, extreme):
    weight = random_weight(form, 70, 768, seed, extreme)
    wide = dequantised(weight)
    if weight.inputs is not None:
        wide = wide[:, weight.inputs.argsort()]
    method = make_int_method(weight, torch.float32, TORCH)
    rows = torch.tensor([3, 69, 0])
    size = wide.abs() + (0 if weight.minimums is None else weight.minimums.abs().max().double())
    error = (method.embedding(rows).double() - wide[rows]).abs()
    assert (error <= 2.0**-23 * size[rows]).all()  # a factor or a minimum rounds once
    x = torch.randn(3, 768, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(method.apply(x), x @ method.embedding(torch.arange(70)).T)


@settings(max_examples=20, deadline=None)
@given(form=forms(), seed=st.integers(0, 100))
def test_rows_may_come_in_parts(form, seed):
    weight = random_weight(form, 70, 768, seed)
    rows = IntRows(70, torch.bfloat16, TORCH)
    for start in (32, 0, 64):
        rows.store(start, weight.by_rows(lambda tensor, start=start: tensor[start : start + 32]))
    every = torch.arange(70)
    whole = IntWeight(weight, torch.bfloat16)
    assert torch.equal(rows.method().embedding(every), whole.embedding(every))
