"""Weights of 8 and 4 bits in every form, in the C kernels built for each kind of processor."""

import math
import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from nanovllm.features.graphs.cpu_graph import CPUGraph
from nanovllm.features.quantization.integer import IntRows, IntWeight, quantize
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
    with CPUGraph(33) as recording:
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


@pytest.mark.parametrize(
    ("bits", "group", "short"), [(8, 128, False), (8, 64, True), (8, 32, False), (4, 32, False)]
)
def test_rounding_in_c_is_that_of_torch(bits, group, short):
    for weight in weights_to_round(70, 384):
        rounded, whole = (IntRows(70, torch.bfloat16, CKernels()) for _ in range(2))
        for start, stop in ((32, 70), (0, 32)):
            rounded.store_rounded(start, weight[start:stop], bits, group, short_inputs=short)
        whole.store(0, quantize(weight, bits, group)._replace(short_inputs=short))
        ours, torchs = rounded.method(), whole.method()
        for tensor in ("packed", "scales"):
            found, expected = (getattr(each.panels, tensor)[:2] for each in (ours, torchs))
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        last = torch.arange(64, 70)  # of a panel with rows that are not there
        found, expected = (each.embedding(last) for each in (ours, torchs))
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def weights_to_round(n, k):
    """Yield all sizes; quotients between two integers; zeros; numbers that are none."""
    generator = torch.Generator().manual_seed(0)
    for exponent in (-140, -133, -24, -21, -18, -15, -6, 0, 15, 23, 120):
        weight = torch.randn(n, k, generator=generator)
        yield torch.ldexp(weight, torch.tensor(exponent)).bfloat16()
    yield (torch.randint(-128, 129, (n, k), generator=generator) / 8).bfloat16()
    yield randn(n, k).abs()
    bits = torch.randint(-(2**15), 2**15, (n, k), generator=generator, dtype=torch.int16)
    yield bits.view(torch.bfloat16)
    special = randn(n, k)
    special[:, :128] = 0
    special[3, :32] = -0.0
    special[4, 32] = special[5, 130] = torch.inf
    special[6, 64] = special[7, 131] = -torch.inf
    special[8, 96] = special[9, 132] = torch.nan
    special[10, 200:202] = torch.tensor([torch.inf, -torch.inf])
    special[11, 200:202] = torch.tensor([torch.inf, -torch.nan])
    yield special


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
