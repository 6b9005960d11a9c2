"""The C kernels of a mixture of experts against torch in float64, built for each processor."""

import faulthandler
import os

import pytest
import torch

from nanovllm.features.graphs.cpu_graph import CPUGraph
from nanovllm.features.quantization.fp4 import unpack_fp4
from nanovllm.features.quantization.integer import IntTensor, quantize
from nanovllm.kernels import torch_experts
from nanovllm.kernels.cpu import ops
from nanovllm.kernels.cpu.kernels import CKernels
from nanovllm.kernels.cpu.packed import PackedWeight
from nanovllm.kernels.torch_experts import ExpertChoice, ExpertLinear, ExpertMLP, Groups
from tests.closeness import assert_close
from tests.kernels.cpu.helpers import make_int_method, native, randn
from tests.kernels.cpu.int_weights import Form, dequantised, random_weight

pytestmark = [native, pytest.mark.usefixtures("kernels", "inference_mode")]
NUM_EXPERTS, TOP_K = 7, 3
FORMS = {
    "zeros": Form(4, "zeros", 32, False, False),
    "nvfp4": Form(4, "fp4", 16, True, False),
}


def random_routing(tokens, num_experts=NUM_EXPERTS, top_k=TOP_K):
    logits = randn(tokens, num_experts, seed=tokens)
    return torch_experts.route(logits, ExpertChoice(top_k, renormalize=True))


def random_mxfp4(n, k):
    """Return pairs of 4-bit numbers, every pair among them, and scales of about k ** -0.5."""
    generator = torch.Generator().manual_seed(n)
    pairs = torch.randint(256, (n, k // 2), generator=generator).to(torch.uint8)
    scales = torch.randint(121, 125, (n, k // 32), generator=generator).to(torch.uint8)
    return pairs, scales


def in_bits(weight, bits):
    """Return `weight` for the kernels, and what it is in float64 after rounding."""
    if bits == "fp4":
        pairs, scales = random_mxfp4(*weight.shape)
        tensor = unpack_fp4(pairs, scales)
        return make_int_method(tensor, torch.bfloat16, CKernels()), dequantised(tensor)
    if bits in FORMS:
        tensor = random_weight(FORMS[bits], *weight.shape, seed=len(weight))
        small = tensor._replace(scales=(tensor.scales.float() / 4).to(tensor.scales.dtype))
        return make_int_method(small, torch.bfloat16, CKernels()), dequantised(small)
    if bits == 16:
        packed = PackedWeight(*weight.shape)
        packed.store(0, weight)
        return packed, weight.double()
    rounded = quantize(weight, bits, 32)
    minimums = None
    wide = rounded.values.double()
    if bits == 4:
        minimums = randn(*rounded.scales.shape, seed=3).half() / 8
        wide += 8
    wide *= rounded.scales.double().repeat_interleave(32, 1)
    if minimums is not None:
        wide += minimums.double().repeat_interleave(32, 1)
    tensor = IntTensor(rounded.values, rounded.scales, minimums, bits)
    return make_int_method(tensor, torch.bfloat16, CKernels()), wide


def make_mlp(hidden_size, size, bits, activation, interleaved, bias):
    """Return the MLPs of the experts for the kernels, and in float64."""
    gated = activation != "relu2"
    shapes = {"up": ((1 + gated) * size, hidden_size), "down": (hidden_size, size)}
    linears, wide = {}, {}
    for name, (n, k) in shapes.items():
        weight = randn(NUM_EXPERTS * n, k, seed=n) / k**0.5
        method, wide_weight = in_bits(weight, bits)
        b = randn(NUM_EXPERTS * n, seed=k) if bias else None
        linears[name] = ExpertLinear(method, b, n)
        wide[name] = ExpertLinear(wide_weight, None if b is None else b.double(), n)
    rest = activation, interleaved, gated
    return (
        ExpertMLP(linears["up"], linears["down"], *rest),
        ExpertMLP(wide["up"], wide["down"], *rest),
    )


CASES = [
    (16, "silu", False, False),
    (16, "gelu_tanh", False, True),
    (16, "swiglu_oai", True, True),
    (8, "silu", False, True),
    (4, "swiglu_oai", True, False),
    ("fp4", "swiglu_oai", True, True),
    ("zeros", "silu", False, False),
    ("nvfp4", "silu", False, True),
    (16, "relu2", False, True),
    (8, "relu2", False, False),
    (4, "relu2", False, True),
]


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("bits", "activation", "interleaved", "bias"), CASES)
@pytest.mark.parametrize(("hidden_size", "size"), [(96, 160), (256, 32)])
def test_experts(hidden_size, size, bits, activation, interleaved, bias):
    mlp, wide = make_mlp(hidden_size, size, bits, activation, interleaved, bias)
    for tokens in (0, 1, 2, 37, 150):
        x, routing = randn(tokens, hidden_size, seed=tokens), random_routing(tokens)
        assert ops.supports_experts(x, mlp)
        y = ops.experts(x, routing, mlp)
        expected = torch_experts.experts(x.double(), routing, wide)
        assert y.shape == expected.shape
        if tokens:
            tolerance = (
                0.03 if bits in (4, "fp4", *FORMS) else 0.01
            )  # inputs of 4-bit weights have 8 bits
            assert_close(y, expected, of_largest=tolerance)
        for part in (slice(1), slice(tokens - 1, None), slice(20, 77)) if tokens > 77 else ():
            some = torch_experts.Routing(*(each[part].contiguous() for each in routing))
            assert torch.equal(ops.experts(x[part], some, mlp), y[part]), "the bits of a token"


def test_a_late_thread_finds_the_choice_of_a_later_layer():
    """Symptom: a step never ended beside other work. A thread that had lost its core counted the
    blocks of experts in memory that a later layer had written. Needs more threads than cores.
    """
    mlp, _ = make_mlp(96, 160, 16, "silu", False, False)
    x, layers, tokens = randn(2, 96), range(12), 2  # of 3 to 6 experts
    routers = [randn(tokens, NUM_EXPERTS, seed=layer) * (layer + 1) for layer in layers]

    def forward():
        found = []
        for logits in routers:
            routing = ops.route(logits, ExpertChoice(TOP_K, renormalize=True))
            found.append(ops.experts(x, routing, mlp))
        return found

    expected = forward()
    with CPUGraph(tokens) as recording:
        found = forward()
    num_threads = torch.get_num_threads()
    faulthandler.dump_traceback_later(60, exit=True)  # a kernel that waits cannot be interrupted
    torch.set_num_threads(4 * len(os.sched_getaffinity(0)))
    try:
        for _ in range(150):
            recording.run(tokens, tokens)
            assert all(map(torch.equal, found, expected))
    finally:
        torch.set_num_threads(num_threads)
        faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize("n", [1, 100])
def test_a_linear_in_mxfp4(n):
    """Whole numbers as inputs show that the largest sums of a group are exact."""
    pairs, scales = random_mxfp4(n, 256)
    pairs[0] = 0x77  # the largest number
    scales[0] = torch.tensor([0, 1, 60, 120, 127, 128, 200, 200])
    tensor = unpack_fp4(pairs, scales)
    packed, weight = make_int_method(tensor, torch.bfloat16, CKernels()), dequantised(tensor)
    ids = torch.arange(n)
    assert torch.equal(packed.embedding(ids).double(), weight.bfloat16().double())
    for m in (1, 2, 13, 40):
        x = randn(m, 256, seed=m).mul(40).round().clamp(-127, 127)
        x[:, ::32] = 127  # the scale of each group of inputs is 1
        x[-1] = 127
        expected = x.double() @ weight.T
        half_step = 2.0 ** (expected.frexp().exponent - 9)  # of bfloat16
        slack = (x.double().abs() @ weight.abs().T) * 2**-22  # float32 sums of groups
        assert ((packed.apply(x).double() - expected).abs() <= half_step + slack).all()


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(4, 4), (7, 1), (32, 4), (130, 8)])
def test_route(num_experts, top_k, renormalize):
    logits = randn(50, num_experts)
    logits[20:] = logits[20:].round()  # many are equal
    scales = randn(num_experts, seed=1)
    choice = ExpertChoice(top_k, renormalize, 1.7, scales, logit_factor=0.3)
    found = ops.route(logits, choice)
    expected = torch_experts.route(logits, choice)
    assert torch.equal(found.ids, expected.ids)
    assert_close(found.weights, expected.weights, rtol=2e-6, atol=1e-7)
    for row in (0, 30, 49):
        alone = ops.route(logits[row : row + 1], choice)
        assert torch.equal(alone.weights[0], found.weights[row])


@pytest.mark.parametrize(
    ("num_experts", "top_k", "groups"),
    [
        (32, 4, None),
        (5, 5, None),
        (37, 1, None),
        (24, 5, Groups(4, 2, 2)),
        (21, 3, Groups(7, 3, 1)),
        (256, 8, Groups(8, 4, 2)),
    ],
)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("renormalize", [False, True])
def test_route_by_scores(num_experts, top_k, groups, sigmoid, renormalize, has_bias):
    dtype = torch.float32 if num_experts > 32 else torch.bfloat16
    logits = randn(40, num_experts, seed=3).to(dtype)
    bias = randn(num_experts, seed=4).float() / 3 if has_bias else None
    choice = ExpertChoice(
        top_k, renormalize, 2.5, sigmoid=sigmoid, bias=bias, epsilon=0.01, groups=groups
    )
    found = ops.route(logits, choice)
    expected = torch_experts.route(logits, choice)
    assert torch.equal(found.ids, expected.ids)
    assert_close(found.weights, expected.weights, rtol=2e-6, atol=1e-7)
    if groups:
        used = [row.unique().numel() for row in found.ids // (num_experts // groups.number)]
        assert max(used) == min(groups.kept, top_k)
    for row in (0, 30, 39):
        alone = ops.route(logits[row : row + 1], choice)
        assert torch.equal(alone.weights[0], found.weights[row])
    logits[1, 2] = torch.nan
    broken = ops.route(logits, choice)
    assert broken.weights.isnan().any(1).tolist() == [False, True, *[False] * 38]
    assert ((broken.ids >= 0) & (broken.ids < num_experts)).all()


@pytest.mark.parametrize(("n", "k"), [(1, 8), (7, 96), (64, 250), (129, 513)])
def test_a_wide_linear(n, k):
    weight = randn(n, k, seed=k).float() / 3
    weight += weight * randn(n, k, seed=n) / 1000  # more bits than bfloat16 has
    wide = randn(70, 2 * k, seed=5)
    x = wide[:, :k]  # its rows lie apart
    found = ops.wide_linear(x, weight)
    expected = x.double() @ weight.double().T
    assert found.dtype == torch.float32
    assert_close(found.double(), expected, rtol=0, atol=3e-6 * k**0.5)
    for rows in (slice(1), slice(69, 70), slice(3, 9), slice(33, 70)):
        assert torch.equal(ops.wide_linear(x[rows], weight), found[rows])


def test_a_logit_that_is_no_number_makes_the_weights_nan():
    logits = randn(4, 40)
    logits[1, 33], logits[2, 5], logits[3, 7] = torch.nan, torch.inf, -torch.inf
    found = ops.route(logits, ExpertChoice(4, renormalize=True))
    assert found.weights.isnan().any(1).tolist() == [False, True, True, False]
    assert ((found.ids >= 0) & (found.ids < 40)).all()


def test_experts_with_inputs_in_another_order_are_computed_by_torch():
    mlp, _ = make_mlp(96, 32, "zeros", "silu", False, False)
    tensor = random_weight(Form(4, "zeros", 32, False, True), NUM_EXPERTS * 64, 96, 1)
    method = make_int_method(tensor, torch.bfloat16, CKernels())
    gate_up = mlp.gate_up._replace(weight=method)
    x = randn(3, 96)
    assert ops.supports_experts(x, mlp)
    mlp = mlp._replace(gate_up=gate_up)
    assert not ops.supports_experts(x, mlp)
    routing = random_routing(3)
    expected = torch_experts.experts(x, routing, mlp)
    assert torch.equal(CKernels().experts(x, routing, mlp), expected)


def test_a_recording_runs_with_fewer_tokens():
    mlp, _ = make_mlp(96, 160, 16, "silu", False, False)
    x, logits = randn(8, 96), randn(8, NUM_EXPERTS)

    def forward():
        return ops.experts(x, ops.route(logits, ExpertChoice(TOP_K, renormalize=True)), mlp)

    expected = forward()
    with CPUGraph(8) as recording:
        y = forward()
    for tokens in (8, 1, 5):
        y.zero_()
        recording.run(tokens, 0)
        assert torch.equal(y[:tokens], expected[:tokens])
        assert not y[tokens:].any()
