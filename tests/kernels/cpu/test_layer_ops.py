"""The C kernels between a layer's linears, against float64, built for each kind of processor."""

import pytest
import torch
import torch.nn.functional as F

from nanovllm.attention.batch import Batch
from nanovllm.attention.cpu import CPUBackend
from nanovllm.attention.spec import AttentionSpec, QKNormRope
from nanovllm.features.graphs.cpu_graph import CPUGraph
from nanovllm.kernels.cpu import ops
from nanovllm.kernels.cpu.kernels import CKernels
from nanovllm.kernels.torch_kernels import TORCH
from nanovllm.kernels.torch_math import ACTIVATIONS, NORM_CENTRED, NORM_ROUNDED, NORM_WIDE
from nanovllm.layers.rotary_embedding import RotaryEmbedding, inverse_frequencies
from tests.kernels.cpu.helpers import native, randn

KERNELS = {"c": CKernels(), "torch": TORCH}
pytestmark = [native, pytest.mark.usefixtures("inference_mode")]


def exact_norm(x, weight, eps, kind):
    """Return the RMSNorm of `x` in float64."""
    normed = x.double() * (x.double().square().mean(-1, keepdim=True) + eps).rsqrt()
    if weight is None:
        return normed
    return normed * (weight.double() + (1 if kind == NORM_CENTRED else 0))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("size", [16, 77, 1000])
def test_norms_of_each_kind(size, implementation):
    """One rounding is half a bit of the result; NORM_ROUNDED rounds twice."""
    kernels, eps = KERNELS[implementation], 1e-5
    wide, weight = randn(5, size + 50, seed=size), randn(size, seed=1)
    x, residual = wide[:, 20 : size + 20], randn(5, size, seed=2)
    for kind, given in (
        (NORM_ROUNDED, weight), (NORM_WIDE, weight), (NORM_CENTRED, weight), (NORM_WIDE, None)
    ):  # fmt: skip
        bits = 2**-7 if kind == NORM_ROUNDED else 1.01 * 2**-8
        expected = exact_norm(x, given, eps, kind)
        error = (kernels.rms_norm(x, given, eps, kind).double() - expected).abs()
        assert (error <= bits * expected.abs()).all()
        changed = wide.clone()
        part = changed[:, 20 : size + 20]
        assert kernels.rms_norm(part, given, eps, kind, out=part).data_ptr() == part.data_ptr()
        assert torch.equal(part, kernels.rms_norm(x, given, eps, kind))
        assert torch.equal(changed[:, :20], wide[:, :20])
        assert torch.equal(changed[:, size + 20 :], wide[:, size + 20 :])
        total = residual.clone()
        found = kernels.add_rms_norm(x.contiguous(), total, given, eps, kind, 0.3)
        assert torch.equal(total, residual + (x.float() * 0.3).bfloat16())
        expected = exact_norm(total, given, eps, kind)
        assert ((found.double() - expected).abs() <= bits * expected.abs()).all()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("size", [1, 16, 77, 1000])
def test_layer_norm(size, implementation):
    """Of numbers whose mean is far from 0. One rounding is half a bit of the result."""
    kernels = KERNELS[implementation]
    weight, bias = randn(size, seed=1) + 1, randn(size, seed=2)
    x, residual = randn(5, size, seed=size), randn(5, size, seed=3) * 3 + 10
    for given in (bias, None):
        for added in (x, None):
            total = residual.clone()
            found = kernels.add_layer_norm(added, total, weight, given, 1e-5).double()
            assert torch.equal(total, residual if added is None else residual + added)
            wide_bias = None if given is None else given.double()
            exact = F.layer_norm(total.double(), (size,), weight.double(), wide_bias, 1e-5)
            assert ((found - exact).abs() <= 1.01 * 2**-8 * exact.abs() + 3e-5).all()


EXACT = {
    **ACTIVATIONS,
    "gelu": lambda x: x * 0.5 * torch.erfc(-x * 0.5**0.5),
    "gelu_tanh": lambda x: x * torch.sigmoid((8 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)),
}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("size", [24, 1035])
def test_activations(size, implementation):
    """Torch's GELUs have an error of 2e-7, absolute: they add 1 to a number near -1."""
    kernels, wide = KERNELS[implementation], randn(9, size + 32, seed=size) * 4
    gate, up = wide[:, 16:-16], randn(9, size + 3, seed=2)[:, 3:]
    wide[0, 16:23] = torch.tensor([-1000.0, 1000.0, 0.0, -88.0, 7.5, -3e4, -12.0])
    both = torch.cat([gate, up], 1)
    inexact = ("gelu_tanh", "gelu") if kernels is TORCH else ()
    for activation, function in EXACT.items():
        expected = function(gate.double()) * up.double()
        bound = 2**-7 * expected.abs() + (
            2e-7 * gate.double().abs() * up.double().abs() if activation in inexact else 1e-30
        )
        found = kernels.mul_act(gate, up, activation)
        assert ((found.double() - expected).abs() <= bound).all()
        for number in (1, 3):  # gates of a row, each for some neighbours
            few = gate[:, 5 : 5 + number]
            repeated = few.repeat_interleave(size // number, 1)
            few_found = kernels.mul_act(few, up, activation)
            if (kernels, activation) != (TORCH, "gelu"):  # whose last bit depends on the strides
                assert torch.equal(few_found, kernels.mul_act(repeated, up, activation))
        plain = gate.contiguous()
        times_one = kernels.mul_act(plain, torch.ones_like(up), activation)
        assert torch.equal(kernels.act(plain, activation), times_one)
        if activation not in ("sigmoid", "identity"):
            assert torch.equal(kernels.act_and_mul(both.clone(), activation), found)
    bounded, moved = gate.double().clamp(max=7), up.double().clamp(-7, 7) + 1
    expected = bounded * torch.sigmoid(1.702 * bounded) * moved
    found = kernels.act_and_mul(both.clone(), "swiglu_oai").double()
    assert ((found - expected).abs() <= 1.02 * 2**-8 * expected.abs() + 1e-30).all()
    for factor in (0.7, torch.tensor([0.7], dtype=torch.bfloat16)):
        scaled = wide.clone()
        kernels.scale(scaled[:, 16:-16], factor)
        expected = (gate.double() * torch.as_tensor(factor).double()).bfloat16()
        assert torch.equal(scaled, torch.cat([wide[:, :16], expected, wide[:, -16:]], 1))


@pytest.mark.usefixtures("kernels")
def test_what_is_no_number_stays_so_in_activations():
    x = torch.ones(1, 64, dtype=torch.bfloat16)
    x[0, 5] = torch.nan
    ones, kernels = torch.ones_like(x), CKernels()
    found = [kernels.mul_act(x, ones, activation) for activation in EXACT]
    found += [kernels.act(x.clone(), activation) for activation in EXACT]
    for activation in ("gelu_tanh", "swiglu_oai"):
        for pair in ((x, ones), (ones, x)):
            found.append(kernels.act_and_mul(torch.cat(pair, 1), activation))
    for result in found:
        assert result[0].isnan().nonzero().tolist() == [[5]]


@native
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("size", [1, 24, 77, 1000])
def test_copy_rows_between_rows_that_lie_apart(size):
    x, y, rows = randn(5, size + 9)[:, 3 : size + 3], randn(40, 3 * size, seed=1), [33, 0, 7, 39, 8]
    expected = y.clone()
    expected[rows, size : 2 * size] = x
    ops.copy_rows(x, y[:, size : 2 * size], y_rows=torch.tensor(rows))
    assert torch.equal(y, expected)
    expected[:5, 2 * size :] = x
    ops.copy_rows(x, y[:, 2 * size :])
    assert torch.equal(y, expected)
    expected[:2, :size] = x[[4, 1]]
    ops.copy_rows(x, y[:, :size], x_rows=torch.tensor([4, 1]))
    assert torch.equal(y, expected)


@pytest.mark.parametrize("page_bytes", [64, 3 * 2**16])
def test_copy_pages(page_bytes):
    pool = torch.randint(256, (9, page_bytes), dtype=torch.uint8)
    expected = pool.clone()
    expected[[4, 0, 8]] = pool[[1, 7, 1]]
    ops.copy_pages(pool, [1, 7, 1], [4, 0, 8])
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("kv_parts", [0, 1, 2])
def test_a_recording_computes_what_the_calls_compute(kv_parts):
    """All kernels that other families need, recorded for 4 tokens and run for 3."""
    kernels, heads, head_dim = CKernels(), 4, 64
    spec = AttentionSpec(
        *(heads, 2, head_dim, torch.bfloat16, torch.device("cpu"), 32),
        scale=1.0,
        window=40,
        softcap=20.0,
        sinks=True,
    )
    backend = CPUBackend(spec)
    norm = QKNormRope(
        *(randn(head_dim), randn(head_dim, seed=1) if kv_parts else None, 1e-6),
        RotaryEmbedding(90, inverse_frequencies(32, 1e4)).cos_sin,
        kind=NORM_WIDE,
        interleaved=True,
        v_norm=True,
        q_scale=torch.rand(90) + 1,
    )
    positions = torch.tensor([80, 3, 33, 0])
    batch = Batch(
        input_ids=positions,
        positions=positions,
        slot_mapping=positions + torch.arange(4) * 96,
        cu_seqlens_q=torch.arange(5, dtype=torch.int32),
        seq_lens=positions.int() + 1,
        block_tables=torch.arange(12, dtype=torch.int32).view(4, 3),
    )
    width = (heads + 2 * kv_parts) * head_dim
    weight, factor, sinks = randn(width, seed=2), randn(1, seed=3), randn(heads, seed=4).float()
    x, residual = torch.empty(4, width, dtype=torch.bfloat16), randn(4, width, seed=5)
    before = torch.zeros(backend.kv_cache_shape(12), dtype=torch.bfloat16)
    before[..., :head_dim] = randn(*before.shape[:-1], head_dim, seed=6)

    def compute(residual, cache):
        normed = kernels.add_rms_norm(x, residual, weight, 1e-6, NORM_CENTRED, 0.3)
        kernels.rms_norm(normed[:, 64:], weight[64:], 1e-6, NORM_WIDE, out=normed[:, 64:])
        normed = kernels.add_layer_norm(normed, residual, weight, None, 1e-5)
        q = backend.store(normed, norm, cache, batch)
        out = backend.attend(q, cache, batch, sinks=sinks).flatten(1)
        kernels.scale(out, factor)
        out = kernels.mul_act(q.flatten(1), out, "gelu_tanh")
        out = kernels.mul_act(out, q.flatten(1), "sigmoid")
        half = kernels.act_and_mul(out, "gelu_tanh")
        half = kernels.act_and_mul(kernels.mul_act(half, half, "silu"), "swiglu_oai")
        return kernels.act(kernels.act(half, "gelu"), "relu2")

    recorded_cache, recorded_residual = before.clone(), residual.clone()
    with CPUGraph(4) as recording:
        found = compute(recorded_residual, recorded_cache)
    x.copy_(randn(4, width, seed=7))
    recording.run(3, 3)
    expected = compute(residual, before)
    assert torch.equal(found[:3], expected[:3])
    assert torch.equal(recorded_residual[:3], residual[:3])
    assert torch.equal(recorded_cache[:, :9], before[:, :9])
    assert not found[3].any()
