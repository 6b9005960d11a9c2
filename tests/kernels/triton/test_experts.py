"""The Triton kernels of a mixture of experts against torch; interpreted without a GPU."""

import functools

import pytest
import torch

from nanovllm.kernels import torch_experts
from nanovllm.kernels.torch_experts import ExpertChoice, ExpertLinear, ExpertMLP, Groups
from nanovllm.kernels.triton import experts as triton_experts
from tests.closeness import assert_close
from tests.kernels.triton.harness import ARCHS, compile_launches
from tests.kernels.triton.inputs import each_dtype, randn
from tests.kernels.triton.interpreter import patch_interpreter
from tests.kernels.triton.test_compile import assert_fits, meta

pytestmark = pytest.mark.usefixtures("inference_mode")
patch_interpreter()


@pytest.mark.thinned(5)
@each_dtype
@pytest.mark.parametrize(
    ("tokens", "num_experts", "activation", "interleaved", "bias"),
    [
        (0, 5, "silu", False, False),
        (1, 5, "silu", False, False),
        (2, 9, "gelu_tanh", False, True),
        (70, 5, "swiglu_oai", True, True),
        (150, 3, "silu", False, True),
        (20, 5, "relu2", False, True),
    ],
)
def test_experts(tokens, num_experts, activation, interleaved, bias, dtype):
    hidden_size, size = 40, 72
    gated = activation != "relu2"
    linears = []
    for n, k in (((1 + gated) * size, hidden_size), (hidden_size, size)):
        weight = randn(num_experts * n, k, dtype=dtype, seed=n) / k**0.5
        linears.append(
            ExpertLinear(weight, randn(num_experts * n, dtype=dtype) if bias else None, n)
        )
    mlp = ExpertMLP(linears[0], linears[1], activation, interleaved, gated)
    x = randn(tokens, hidden_size, dtype=dtype)
    routing = torch_experts.route(
        randn(tokens, num_experts, dtype=dtype), ExpertChoice(3, renormalize=True)
    )
    expected = torch_experts.experts(x, routing, mlp)
    found = triton_experts.experts(x, routing, mlp)
    # torch rounds each linear's result, too: bfloat16 is 8 times as coarse as float16.
    tolerances = {torch.float32: 1e-5, torch.float16: 8e-3, torch.bfloat16: 6.4e-2}
    tolerance = tolerances[dtype]
    assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(4, 4), (7, 1), (130, 8)])
def test_route(num_experts, top_k, renormalize):
    logits = randn(20, num_experts, dtype=torch.float32)
    logits[10:] = logits[10:].round()  # many are equal
    scales = randn(num_experts, dtype=torch.float32, seed=1)
    choice = ExpertChoice(top_k, renormalize, 1.7, scales, logit_factor=0.3)
    found = triton_experts.route(logits, choice)
    expected = torch_experts.route(logits, choice)
    assert torch.equal(found.ids, expected.ids)
    assert_close(found.weights, expected.weights, rtol=1e-5, atol=1e-6)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("sigmoid", "renormalize", "groups"),
    [
        (False, False, None),
        (True, True, None),
        (True, True, Groups(4, 2, 2)),
        (False, True, Groups(8, 3, 1)),
    ],
)
def test_route_by_scores(sigmoid, renormalize, groups, has_bias):
    logits = randn(20, 24, dtype=torch.float32)
    bias = randn(24, dtype=torch.float32, seed=1) / 3 if has_bias else None
    choice = ExpertChoice(
        5, renormalize, 2.5, sigmoid=sigmoid, bias=bias, epsilon=0.01, groups=groups
    )
    found = triton_experts.route(logits, choice)
    expected = torch_experts.route(logits, choice)
    assert torch.equal(found.ids, expected.ids)
    assert_close(found.weights, expected.weights, rtol=1e-5, atol=1e-6)
    logits[1, 2] = torch.nan
    broken = triton_experts.route(logits, choice)
    assert broken.weights.isnan().any(1).tolist() == [False, True, *[False] * 18]
    assert ((broken.ids >= 0) & (broken.ids < 24)).all()


@pytest.mark.parametrize("tokens", [4, 2000])
def test_they_compile_for_other_gpus(tokens):
    """At the shapes of gpt-oss-20b, for a decode step and for a prompt."""
    mlp = ExpertMLP(
        ExpertLinear(meta(32 * 5760, 2880, dtype=torch.bfloat16), None, 5760),
        ExpertLinear(meta(32 * 2880, 2880, dtype=torch.bfloat16), None, 2880),
        "swiglu_oai",
        True,
    )
    routing = torch_experts.Routing(
        meta(tokens, 4, dtype=torch.int32), meta(tokens, 4, dtype=torch.float32)
    )
    x = meta(tokens, 2880, dtype=torch.bfloat16)
    archs = ARCHS[:2] if tokens == 4 else (90,)
    compiled = compile_launches((triton_experts.experts, x, routing, mlp), archs=archs)
    for kernels in compiled.values():
        assert [kernel.name for kernel in kernels] == ["_group", "_gate_up", "_down", "_sum"]
        assert all(kernel.n_spills == 0 for kernel in kernels), kernels
    if tokens == 4:
        logits = meta(tokens, 256, dtype=torch.bfloat16)
        bias = meta(256, dtype=torch.float32)
        grouped = ExpertChoice(8, renormalize=True, sigmoid=True, bias=bias, groups=Groups(8, 4, 2))
        for choice in (ExpertChoice(4, renormalize=True), grouped):
            route = functools.partial(triton_experts.route, choice=choice)
            assert_fits(compile_launches((route, logits), archs=archs), "_route")
