"""Weights in FP8, 8 and 4 bits against float64, with the C kernels, oneDNN and plain torch."""

import pytest
import torch

from nanovllm import SamplingParams
from nanovllm.errors import ConfigError
from nanovllm.features.quantization.fp8 import Fp8Weight, quantize_fp8
from nanovllm.features.quantization.integer import (
    IntTensor,
    IntWeight,
    choose_group_size,
    quantize,
)
from nanovllm.features.quantization.rounding import rounded_rows
from nanovllm.kernels.cpu import packed as packed_weights
from nanovllm.kernels.cpu.kernels import OneDnnKernels
from nanovllm.kernels.cpu.library import library
from nanovllm.kernels.cpu.packed import (
    IntPanelWeight,
    OneDnnWeight,
    PackedWeight,
    PanelWeight,
    use_onednn,
)
from nanovllm.kernels.torch_kernels import TORCH
from nanovllm.layers.linear import WeightModule
from nanovllm.platform.cpu import CPU
from tests.kernels.cpu.helpers import make_int_method

PACKED_BY_TORCH = {
    dtype: OneDnnWeight if use_onednn(torch.empty(1024, 1024, dtype=dtype)) else type(None)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
}
"""The method for a weight that the C kernels do not support, by dtype, on this processor."""

native = pytest.mark.skipif(library() is None, reason="no compiler here")


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def kernels_of(weight, native=True):
    return CPU().kernels(weight.dtype, native=native)


def method_of(weight, quantization, native=True, is_embedding=False):
    kernels = kernels_of(weight, native)
    if quantization is None:
        return kernels.pack(weight, is_embedding=is_embedding)
    rows = rounded_rows(quantization, weight, kernels)
    rows.store(0, weight)
    return rows.method()


def dequantised(weight):
    group = weight.values.shape[1] // weight.scales.shape[1]
    scales = weight.scales.double().repeat_interleave(group, 1)
    if weight.minimums is None:
        return weight.values.double() * scales
    return (weight.values.double() + 8) * scales + weight.minimums.double().repeat_interleave(
        group, 1
    )


def with_minimums(n, k):
    """Return a random weight of 4 bits with minimums."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-8, 8, (n, k), generator=generator, dtype=torch.int8)
    scales, minimums = (randn(n, k // 32, seed=seed).half() for seed in (1, 2))
    return IntTensor(values, scales, minimums, 4)


def int_tensor(kind, n, k):
    """Return a random weight of `kind`: int8, int4, or int4 with minimums."""
    return with_minimums(n, k) if kind == "minimums" else quantize(randn(n, k), int(kind), 32)


KINDS = pytest.mark.parametrize("kind", ["8", "4", "minimums"])


@pytest.mark.parametrize(("bits", "group"), [(8, 32), (8, 128), (4, 32), (4, 64)])
def test_rounding_is_within_half_a_step(bits, group):
    weight = randn(50, 256)
    weight[3, :group] = 0
    rounded = quantize(weight, bits, group)
    assert rounded.values.int().abs().max() <= 2 ** (bits - 1)
    error = (dequantised(rounded) - weight.double()).abs()
    step = rounded.scales.double().abs().repeat_interleave(group, 1)
    # The scale is rounded to float16, which moves the ends of the range by up to 2^-12 of it.
    assert (error <= step * (0.5 + 2.0**-12 * 2 ** (bits - 1) + 0.5 * (bits == 4)) + 1e-12).all()
    assert (error <= 0.5001 * step + 1e-12).double().mean() > (0.9 if bits == 4 else 0.99)
    assert (rounded.values[3, :group] == 0).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_scales_beyond_float16_are_its_largest_or_0(bits):
    weight = randn(3, 64) * torch.tensor([[1e30], [1e-12], [1.0]]).bfloat16()
    weight[2, 40] = torch.inf
    values, scales = (rounded := quantize(weight, bits, 32))[:2]
    limit = 2 ** (bits - 1)
    assert (scales[0].abs() == 65504).all()
    assert ((values[0] == -limit) | (values[0] == limit - 1)).all()
    assert (scales[1] == 0).all()
    assert (values[1] == 0).all()
    assert scales[2].isfinite().tolist() == [True, False], "an error in a weight shows"
    assert dequantised(rounded)[2, :32].isfinite().all()


@KINDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_int_weight_in_plain_torch_equals_the_rounded_one(kind, dtype):
    weight = int_tensor(kind, 70, 96)
    method = IntWeight(weight, dtype)
    expected = dequantised(weight).float().to(dtype)  # products are exact, a sum is rounded once
    assert torch.equal(method.embedding(torch.tensor([5, 69, 0])), expected[[5, 69, 0]])
    x, bias = randn(4, 96).to(dtype), randn(70, seed=3).to(dtype)
    assert torch.equal(method.apply(x), x @ expected.T)
    assert torch.equal(method.apply(x, bias), torch.nn.functional.linear(x, expected, bias))


@native
@KINDS
def test_native_and_plain_agree(kind):
    weight = int_tensor(kind, 70, 256)
    packed, plain = (
        make_int_method(weight, torch.bfloat16, kernels_of(weight.scales.bfloat16(), n))
        for n in (True, False)
    )
    assert (type(packed), type(plain)) == (IntPanelWeight, IntWeight)
    rows = torch.tensor([5, 69, 0])
    assert torch.equal(packed.embedding(rows), plain.embedding(rows))
    x, bias = randn(9, 256), randn(70, seed=3) * 100
    ours, torchs = packed.apply(x, bias).double(), plain.apply(x, bias).double()
    step = x.view(9, 8, 32).abs().amax(-1).double().repeat_interleave(32, 1) / 127
    size = x.double().abs() @ dequantised(weight).abs().T + bias.double().abs()
    assert ((ours - torchs).abs() <= 0.51 * step @ dequantised(weight).abs().T + size / 128).all()


def test_groups_divide_the_inputs():
    assert [choose_group_size("int8", k) for k in (1024, 192, 96)] == [128, 64, 32]
    assert choose_group_size("int4", 1024) == 32
    with pytest.raises(ConfigError, match='"int4" needs .* multiple of 32, .* has a layer of 48'):
        choose_group_size("int4", 48)


@native
def test_the_method_follows_dtype_and_quantization():
    weight = randn(64, 64)
    assert isinstance(method_of(weight, None), PackedWeight)
    assert isinstance(method_of(weight, "int8"), PanelWeight)
    assert isinstance(method_of(weight, "w8a8"), PanelWeight)
    assert isinstance(method_of(weight, "int8", native=False), IntWeight)
    assert isinstance(method_of(weight.float(), "int4"), IntWeight)
    assert method_of(weight, None, native=False) is None
    assert isinstance(method_of(randn(64, 33), None), PackedWeight)


# Without the C kernels.


def test_onednn_packs_float32():
    assert use_onednn(torch.empty(512, 512)) == torch.backends.mkldnn.is_available()
    assert not use_onednn(torch.empty(512, 511))
    assert not use_onednn(torch.empty(1024, 1024, device="meta"))


@pytest.mark.skipif(not use_onednn(torch.empty(1024, 1024)), reason="torch has no oneDNN here")
def test_an_engine_packs_all_but_the_embedding(make_llm, random_model, monkeypatch):
    monkeypatch.setattr(packed_weights, "_ONEDNN_MIN_ELEMENTS", 0)
    packed, plain = (
        make_llm(random_model, device="cpu", native_kernels=native) for native in (True, False)
    )
    modules = packed.engine.executor._runner.network.model.named_modules()
    matrices = {name: m.method for name, m in modules if isinstance(m, WeightModule)}
    assert matrices.pop("model.embed_tokens") is None
    assert {type(method) for method in matrices.values()} == {OneDnnWeight}
    prompts = [[1, 2, 3], [4] * 40, [5]]
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    found, expected = (
        [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        for llm in (packed, plain)
    )
    assert found == expected


def test_onednn_keeps_what_the_c_kernels_cannot_take():
    for dtype, kind in PACKED_BY_TORCH.items():
        weight = randn(1024, 1040).to(dtype)
        kernels = OneDnnKernels() if dtype == torch.bfloat16 else kernels_of(weight)
        assert isinstance(kernels.pack(weight, is_embedding=False), kind)
        assert kernels.pack(weight, is_embedding=True) is None
        assert method_of(weight, None, native=False) is None


@pytest.mark.parametrize(
    "dtype", [d for d, kind in PACKED_BY_TORCH.items() if kind is OneDnnWeight]
)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (70, 96), (33, 17), (300, 512)])
def test_onednn_weight_is_as_good_as_torchs(dtype, n, k):
    weight = randn(n, k).to(dtype)
    method = OneDnnWeight(weight)
    assert torch.equal(method.embedding(torch.tensor([n - 1, 0])), weight[[n - 1, 0]])
    for num_rows in (0, 1, 2, 7, 16, 65):
        x = randn(num_rows, 2 * k, seed=1).to(dtype)[:, ::2]  # rows are not contiguous
        y = method.apply(x)
        assert (y.shape, y.dtype) == ((num_rows, n), dtype)
        expected = x.double() @ weight.double().T
        size = x.double().abs() @ weight.double().abs().T
        assert ((y - expected).abs() <= torch.finfo(dtype).eps * (size + expected.abs())).all()
        bias = randn(n, seed=2).to(dtype)
        expected += bias.double()
        allowed = torch.finfo(dtype).eps * (size + expected.abs() + bias.double().abs())
        assert ((method.apply(x, bias) - expected).abs() <= allowed).all()


# FP8.


def test_fp8_rounds_each_row_by_itself():
    weight = randn(50, 96)
    weight[3], weight[4] = 0, weight[4] * 1e-30
    values, scales = quantize_fp8(weight)
    assert (values.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert values.float().abs().amax(1).tolist() == [0 if row == 3 else 448 for row in range(50)]
    wide = weight.double()
    # E4M3 has 3 bits of mantissa; below 2^-6 (times the scale) its steps are 2^-9.
    allowed = torch.maximum(wide.abs() / 16, scales.double() * 2.0**-10) * 1.0001
    assert ((values.double() * scales.double() - wide).abs() <= allowed).all()
    alone = quantize_fp8(weight[7:8])
    assert torch.equal(alone[0].view(torch.uint8), values[7:8].view(torch.uint8))
    assert torch.equal(alone[1], scales[7:8])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp8_online_is_the_rounded_weight(dtype):
    weight = randn(70, 96).to(dtype)
    values, scales = quantize_fp8(weight)
    method = method_of(weight, "fp8")
    assert isinstance(method, Fp8Weight)
    expected = (values.double() * scales.double()).to(dtype)
    assert torch.equal(method.embedding(torch.tensor([5, 69, 0])), expected[[5, 69, 0]])
    x = randn(4, 96).to(dtype)
    assert torch.allclose(
        method.apply(x).double(), x.double() @ expected.double().T, rtol=1e-2, atol=1e-4
    )


def test_fp8_with_a_scale_for_each_block():
    values = randn(20, 40).to(torch.float8_e4m3fn)
    scales = torch.rand(20, 3, generator=torch.Generator().manual_seed(1))
    method = Fp8Weight(values, scales, 16, torch.float32, TORCH)
    expected = values.double() * scales.double().repeat_interleave(16, 1)[:, :40]
    x, bias = randn(4, 40).float(), randn(20, seed=2).float()
    product = x.double() @ expected.T
    assert torch.allclose(method.apply(x).double(), product, atol=1e-4)
    assert torch.allclose(method.apply(x, bias).double(), product + bias, atol=1e-4)


def test_fp8_product_of_rounded_inputs():
    """The function that GPUs use. Newer versions of torch have it for CPUs too."""
    triton_kernels = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
    device = "cuda" if triton_kernels else "cpu"
    weight, x = randn(48, 64).to(device), randn(5, 64, seed=1).to(device)
    method = method_of(weight, "fp8", native=False)
    rounded = [
        values.double() * scales.double() for values, scales in map(quantize_fp8, (x, weight))
    ]
    try:
        out, alone = method.apply_rowwise(x), method.apply_rowwise(x[2:3])
    except RuntimeError as error:
        if "only supports per-tensor scaling for CPU" in str(error):
            pytest.skip(f"torch {torch.__version__} has it for GPUs only")
        raise
    assert out.dtype == torch.bfloat16
    assert torch.allclose(out.double(), rounded[0] @ rounded[1].T, rtol=2.0**-8, atol=1e-3)
    assert torch.equal(alone, out[2:3])
