"""The Triton kernels of layers agree with float64 and with torch. Without a GPU they are
interpreted, and bfloat16 is left out: the interpreter computes it wrongly.
"""

import logging
import math

import pytest
import torch
from torch.nn.functional import layer_norm

from nanovllm.kernels.cpu.kernels import CKernels, CSamplingKernels, OneDnnKernels
from nanovllm.kernels.cpu.library import library
from nanovllm.kernels.torch_kernels import TORCH
from nanovllm.kernels.torch_math import (
    ACTIVATIONS,
    NORM_CENTRED,
    NORM_ROUNDED,
    NORM_WIDE,
    activate,
)
from nanovllm.kernels.triton import ops as triton_ops
from nanovllm.platform import cuda
from nanovllm.platform.cpu import CPU
from tests.kernels.triton.inputs import (
    CUDA,
    DEVICE,
    EPS,
    assert_as_good,
    each_dtype,
    exact_norm,
    randn,
)
from tests.kernels.triton.interpreter import patch_interpreter

NAN = float("nan")

pytestmark = pytest.mark.usefixtures("inference_mode")
patch_interpreter()


# --- norm and activation


@each_dtype
@pytest.mark.parametrize(
    ("kind", "size"), [(NORM_ROUNDED, 200), (NORM_WIDE, 1), (NORM_CENTRED, 1024)]
)
def test_rms_norm(kind, size, dtype):
    """With a factor on what is added, or without; and of rows that lie apart, in place."""
    x, residual = randn(3, size, dtype=dtype), randn(3, size, dtype=dtype, seed=1) * 5
    total, changed = residual.clone(), residual.clone()
    factors = randn(size, dtype=dtype, seed=2)
    torchs = TORCH.add_rms_norm(x, total, factors, EPS, kind)
    ours = triton_ops.add_rms_norm(x, changed, factors, EPS, kind)
    exact = exact_norm(total.double(), factors.double() + (kind == NORM_CENTRED))
    assert_as_good(ours, torchs, exact)
    assert torch.equal(changed, total)
    assert triton_ops.add_rms_norm(None, x[:0], factors, EPS).shape == (0, size)
    for weight in (randn(size, dtype=dtype, seed=2) * 0.3, None):
        total, changed = residual.clone(), residual.clone()
        torchs = TORCH.add_rms_norm(x, total, weight, EPS, kind, 0.22)
        ours = triton_ops.add_rms_norm(x, changed, weight, EPS, kind, 0.22)
        if dtype == torch.float32:  # the product and the sum may be one instruction, rounded once
            product = x.double() * torch.tensor(0.22, dtype=dtype).double()
            assert_as_good(changed, total, residual.double() + product)
        else:
            assert torch.equal(changed, total)
        factors = 1.0 if weight is None else weight.double() + (kind == NORM_CENTRED)
        exact = exact_norm(changed.double(), factors)
        assert_as_good(ours, torchs, exact)
        wide = torch.full((3, size + 64), 7.0).to(changed)
        part = wide[:, 32 : size + 32]  # aligned alike, so that sums have one order
        part.copy_(changed)
        assert torch.equal(triton_ops.rms_norm(part, weight, EPS, kind), ours)
        assert triton_ops.rms_norm(part, weight, EPS, kind, out=part) is part
        assert torch.equal(part, ours)
        assert (wide[:, :32] == 7).all()
        assert (wide[:, size + 32 :] == 7).all()


@each_dtype
@pytest.mark.parametrize("size", [1, 77, 1024])
def test_layer_norm(size, dtype):
    x, residual = randn(3, size, dtype=dtype), randn(3, size, dtype=dtype, seed=1) * 5 + 10
    weight, bias = randn(size, dtype=dtype, seed=2) + 1, randn(size, dtype=dtype, seed=3)
    for added, given in ((x, bias), (x, None), (None, bias)):
        total, changed = residual.clone(), residual.clone()
        torchs = TORCH.add_layer_norm(added, total, weight, given, EPS)
        ours = triton_ops.add_layer_norm(added, changed, weight, given, EPS)
        assert torch.equal(changed, total)
        wide_bias = None if given is None else given.double()
        exact = layer_norm(total.double(), (size,), weight.double(), wide_bias, EPS)
        assert_as_good(ours, torchs, exact)


def exact_activation(gate, name):
    return gate * 0.5 * torch.erfc(-gate * 0.5**0.5) if name == "gelu" else activate(gate, name)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@each_dtype
@pytest.mark.parametrize("size", [77, 1500])
def test_activations(size, dtype):
    gate_up = randn(3, 2 * size, dtype=dtype) * 8
    gate_up[0, 0], gate_up[1, size], gate_up[2, 0] = -1000.0, 200.0, 1000.0
    gate, up = gate_up.double().chunk(2, -1)
    bounded = gate.clamp(max=7)
    exact = bounded * (1.702 * bounded).sigmoid() * (up.clamp(-7, 7) + 1)
    torchs = TORCH.act_and_mul(gate_up, "swiglu_oai")
    assert_as_good(triton_ops.act_and_mul(gate_up, "swiglu_oai"), torchs, exact)
    torchs = TORCH.act_and_mul(gate_up, "gelu_tanh")
    exact = exact_activation(gate, "gelu_tanh") * up
    assert_as_good(triton_ops.act_and_mul(gate_up, "gelu_tanh"), torchs, exact)
    narrow_gate, narrow_up = gate_up.chunk(2, -1)  # rows that lie apart
    for name in ACTIVATIONS:
        ours = triton_ops.act(narrow_gate.contiguous(), name)
        assert_as_good(ours, TORCH.act(narrow_gate, name), exact_activation(gate, name))
        torchs = TORCH.mul_act(narrow_gate, narrow_up, name)
        ours = triton_ops.mul_act(narrow_gate, narrow_up, name)
        assert_as_good(ours, torchs, exact_activation(gate, name) * up)
        for number in (1, math.gcd(size, 105)):  # gates of a row
            few = slice(3, 3 + number)
            ours = triton_ops.mul_act(narrow_gate[:, few], narrow_up, name)
            torchs = TORCH.mul_act(narrow_gate[:, few], narrow_up, name)
            repeated = gate[:, few].repeat_interleave(size // number, 1)
            assert_as_good(ours, torchs, exact_activation(repeated, name) * up)


def test_an_unknown_activation():
    with pytest.raises(ValueError, match="activation 'tanh' is none of silu"):
        triton_ops.act_and_mul(randn(1, 4), "tanh")


def test_nan_stays():
    x = torch.tensor([[NAN, 1.0]]).to(DEVICE)
    for name in ACTIVATIONS:
        assert triton_ops.act(x, name).isnan().tolist() == [[True, False]]
    for name in ("silu", "gelu_tanh", "swiglu_oai"):
        assert triton_ops.act_and_mul(x, name).isnan().all()
        assert triton_ops.act_and_mul(x.flip(1), name).isnan().all()


# --- choosing the kernels


def test_kernels_for_a_cpu():
    in_c = library() is not None
    assert type(CPU().kernels(torch.bfloat16)) is (CKernels if in_c else OneDnnKernels)
    assert type(CPU().kernels(torch.float32)) is (CSamplingKernels if in_c else OneDnnKernels)
    assert CPU().kernels(torch.bfloat16, native=False) is TORCH


@pytest.mark.skipif(CUDA, reason="needs a machine without a GPU")
def test_without_a_gpu_the_log_says_why(caplog):
    cuda.triton_available.cache_clear()
    with caplog.at_level(logging.INFO, logger="nanovllm.platform.cuda"):
        assert cuda.CUDA(torch.device("cuda")).kernels(torch.bfloat16) is TORCH
        assert cuda.CUDA(torch.device("cuda")).kernels(torch.bfloat16) is TORCH
    (record,) = caplog.records
    assert "which is slower: there is no CUDA device" in record.getMessage()
