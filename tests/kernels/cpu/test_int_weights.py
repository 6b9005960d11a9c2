"""Weights of 8 and 4 bits in every form, in the C kernels built for each kind of processor."""

import math
import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from nanovllm.features.fast_steps.recording import Recording
from nanovllm.features.formats.integer import IntRows, IntWeight
from nanovllm.kernels.cpu.kernels import CKernels
from nanovllm.utils.pages import PageReserve
from tests.closeness import assert_close
from tests.kernels.cpu.helpers import make_int_method, native, randn
from tests.kernels.cpu.int_weights import (
    Form,
    dequantised,
    forms,
    random_inputs,
    random_weight,
    rounded_inputs,
)

pytestmark = [native, pytest.mark.usefixtures("kernels", "inference_mode")]
KINDS = {
    "zeros": Form(4, "zeros", 128, False, False),
    "zeros of 8 bits": Form(8, "zeros", 128, False, False),
    "w8a8": Form(8, "w8a8", 128, True, False),
    "in another order": Form(4, "plain", 128, False, True),
    "a scale for each row": Form(4, "plain", None, True, False),
    "nvfp4": Form(4, "fp4", 16, True, False),
    "mxfp4": Form(4, "fp4", 32, False, False),
}
kinds = pytest.mark.parametrize("form", KINDS.values(), ids=KINDS)


@settings(
    max_examples=int(os.environ.get("INT_WEIGHT_CASES", "40")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    form=forms(),
    n=st.sampled_from([1, 31, 32, 33, 100, 130, 161]),
    groups=st.integers(1, 6),
    has_bias=st.booleans(),
    extreme=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_products_are_those_of_rounded_inputs(form, n, groups, has_bias, extreme, seed):
    check_products(form, n, groups, has_bias, extreme, seed)


def check_products(form, n, groups, has_bias, extreme, seed):
    """Against float64; then of fewer rows, which are the same bits."""
    k = groups * math.lcm(32, form.group or 96)
    weight = random_weight(form, n, k, seed, extreme)
    method = make_int_method(weight, torch.bfloat16, CKernels())
    x, bias = random_inputs(40, k, extreme), randn(n, seed=5) if has_bias else None
    y = method.apply(x, bias)
    wide = dequantised(weight)
    values, doubt = rounded_inputs(x if weight.inputs is None else x[:, weight.inputs], weight)
    expected = values @ wide.T + (0 if bias is None else bias.double())
    # The sums are in float32: each has a term for each group and one for the minimum, factor, bias.
    offsets = 0 if weight.minimums is None else weight.minimums.double().abs().sum(1)
    size = values.abs() @ wide.abs().T + values.abs().amax(1)[:, None] * offsets
    bound = (k / 16 + 8) * 2.0**-24 * size + doubt @ wide.abs().T
    bound += 2.0**-8 * (expected.abs() + bound) + 1e-30
    assert_close(y, expected, atol=bound)
    for m in (0, 1, 2, 7, 13, 33):
        assert torch.equal(method.apply(x[:m], bias), y[:m])
        assert torch.equal(method.apply(x[40 - m :], bias), y[40 - m :])
    rows = torch.arange(n - 1, -1, -1)
    assert torch.equal(method.embedding(rows), IntWeight(weight, torch.bfloat16).embedding(rows))


@kinds
def test_a_recording_runs_with_fewer_tokens(form):
    first = make_int_method(random_weight(form, 256, 128, 1), torch.bfloat16, CKernels())
    second = make_int_method(random_weight(form, 70, 256, 2), torch.bfloat16, CKernels())
    x = randn(33, 128)
    expected = second.apply(first.apply(x))
    with Recording(33) as recording:
        y = second.apply(first.apply(x))
    for tokens in (33, 1, 5):
        y.zero_()
        recording.run(tokens, 0)
        assert torch.equal(y[:tokens], expected[:tokens])
        assert not y[tokens:].any()


@kinds
def test_rows_may_come_in_parts(form):
    """And some of them without factors, which are then 1; the memory may be taken before."""
    weight = random_weight(form, 150, 256, 3)
    x = randn(5, 256)
    reserve = PageReserve(1 << 20)
    rows = IntRows(150, torch.bfloat16, CKernels(), reserve)
    for start, stop in ((64, 128), (0, 64), (128, 150)):
        part = weight.by_rows(lambda tensor, at=slice(start, stop): tensor[at])
        rows.store(start, part._replace(factors=None) if start == 64 else part)
    reserve.close()
    if weight.factors is not None:
        weight.factors[64:128] = 1
    whole = make_int_method(weight, torch.bfloat16, CKernels())
    assert torch.equal(rows.method().apply(x), whole.apply(x))


def test_a_scale_or_a_factor_that_is_no_number_shows():
    for form in KINDS.values():
        weight = random_weight(form, 40, 256, 1)
        weight.scales[3, -1] = torch.nan
        if weight.factors is not None:
            weight.factors[5] = torch.nan
        y = make_int_method(weight, torch.bfloat16, CKernels()).apply(randn(3, 256))
        broken = [3] if weight.factors is None else [3, 5]
        assert y.isnan().all(0).nonzero().flatten().tolist() == broken
        assert y.isnan().any(0).sum() == len(broken)
