"""FP8 products and rounding in Triton agree with float64. Without a GPU they are interpreted."""

import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from nanovllm.features.quantization.fp8 import Fp8Weight, quantize_fp8
from nanovllm.kernels.triton import fp8 as triton_fp8
from nanovllm.kernels.triton.kernels import TritonKernels
from nanovllm.kernels.triton.split_k import split_options
from tests.closeness import assert_close
from tests.kernels.triton.harness import FP8_ARCHS, compile_launches
from tests.kernels.triton.inputs import (
    CAPABILITY,
    CUDA,
    DEVICE,
    each_dtype,
    few_dtypes,
    has_fp8,
    randn,
)
from tests.kernels.triton.interpreter import dot_in_float64, patch_interpreter
from tests.kernels.triton.test_compile import meta

patch_interpreter()


@has_fp8
@each_dtype
@pytest.mark.parametrize(
    ("shape", "group"),
    [
        *[((1, 1), None), ((5, 77), None), ((3, 4096), None), ((2, 5000), None), ((0, 16), None)],
        *[((3, 256), 128), ((4, 300), 128), ((3, 96), 32), ((1, 10), 64), ((0, 128), 128)],
    ],
)
def test_quantize(shape, group, dtype):
    x = randn(*shape, dtype=dtype)
    if len(x) > 2:
        x[1], x[2] = 0, x[2] * 1e-3
    values, scales = triton_fp8.quantize(x, group)
    torchs, torchs_scales = quantize_fp8(x, group)
    assert values.dtype == torchs.dtype
    assert_close(scales, torchs_scales, rtol=1e-6)
    # A scale that differs in its last bit may round a value that is halfway to the other side.
    assert (values.float() != torchs.float()).sum() <= x.numel() / 1000
    wide = torchs_scales.repeat_interleave(group or max(shape[1], 1), 1)[:, : shape[1]].double()
    ours, theirs = values.double() * wide, torchs.double() * wide
    assert ((ours - theirs).abs() <= theirs.abs() / 7 + wide * 2.0**-9).all()


@pytest.mark.thinned(2)
@has_fp8
@few_dtypes
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "group"),
    [
        *[(1, 64, 128, 128), (16, 33, 256, 128), (17, 64, 128, 64), (65, 130, 300, 128)],
        *[(3, 1, 77, 32), (5, 40, 512, 256), (2, 16, 100, 96), (0, 32, 128, 128)],
        (33, 40, 512, 128),
    ],
)
def test_multiply(rows, outputs, inputs, group, dtype):
    x, x_scales = triton_fp8.quantize(randn(rows, inputs), group)
    weight, weight_scales = triton_fp8.quantize(randn(outputs, inputs, seed=1), group)
    weight_scales *= torch.rand_like(weight_scales) * 5  # neighbours of very different magnitudes
    counters = triton_fp8.new_counters(len(weight), weight.device)
    y = triton_fp8.multiply(x, x_scales, weight, weight_scales, group, dtype, counters)
    assert not counters.any()
    wide_x, wide_weight = (
        values.double() * scales.repeat_interleave(group, 1)[:, :inputs].double()
        for values, scales in ((x, x_scales), (weight, weight_scales))
    )
    expected = wide_x @ wide_weight.T
    assert (y.dtype, y.shape) == (dtype, expected.shape)
    # Of each product the tensor cores of Hopper keep what lies less than 14 bits below the first
    # bit of the largest. Here that costs up to 2^-13 of the sum of the products' sizes.
    bound = max(torch.finfo(dtype).eps, 2.0**-11 if CAPABILITY > (0, 0) else 1e-6)
    assert ((y.double() - expected).abs() <= bound * (wide_x.abs() @ wide_weight.abs().T)).all()
    if CAPABILITY == (0, 0):  # on a GPU each tile size may use another instruction
        alone = triton_fp8.multiply(
            x[:1], x_scales[:1], weight, weight_scales, group, dtype, counters
        )
        assert_close(alone, y[:1], rtol=1e-5)


@has_fp8
def test_a_row_has_the_same_bits_in_every_batch_of_up_to_16(monkeypatch):
    """The inputs are split, by the shape of the weight alone."""
    if CAPABILITY == (0, 0):
        monkeypatch.setattr(InterpreterBuilder, "create_dot", dot_in_float64)
    x, x_scales = triton_fp8.quantize(randn(16, 512), 128)
    weight, weight_scales = triton_fp8.quantize(randn(40, 512, seed=1), 128)
    counters = triton_fp8.new_counters(len(weight), weight.device)

    def rows(some):
        args = x[some], x_scales[some], weight, weight_scales, 128, torch.float32, counters
        return triton_fp8.multiply(*args)

    expected = rows(slice(16))
    for some in (slice(1), slice(3, 8), slice(9, 16)):
        assert torch.equal(rows(some), expected[some])


def test_inputs_are_split_where_outputs_are_few():
    """Outputs, steps of 128 inputs, and splits: linears of Qwen3-0.6B and 8B, and the extremes."""
    splits = {(1024, 24): 8, (6144, 32): 1, (4096, 96): 2, (32, 2): 1, (32, 1000): 16}
    most = triton_fp8._SPLIT_PROGRAMS
    assert {case: split_options(16, *case, most)["SPLITS"] for case in splits} == splits
    assert split_options(64, 1024, 24, most)["SPLITS"] == 12


@has_fp8
def test_a_weight_in_blocks_is_multiplied_without_widening():
    """The layer's method rounds its inputs with a scale for each group of the weight."""
    values, scales = triton_fp8.quantize(randn(40, 256), 128)
    x = randn(5, 256, dtype=torch.float16, seed=1)
    weight = Fp8Weight(values, scales, 128, torch.float16, TritonKernels())
    y = weight.apply_groupwise(x, triton_fp8)
    widened = weight.embedding(torch.arange(40, device=DEVICE))
    error = (y.double() - x.double() @ widened.double().T).abs()
    # The error of an input is at most 1/16, and half of that on average. 256 errors partly cancel.
    assert error.max() <= (x.double().abs() @ widened.double().abs().T).max() / 16
    assert error.mean() <= 0.02 * y.double().std()
    if CUDA:
        assert torch.equal(weight.apply(x), y)


def test_group_sizes_that_the_product_supports():
    steps = {128: 128, 256: 128, 64: 64, 96: 32, 32: 32, 16: 0, 100: 0, 1: 0}
    assert {group: triton_fp8.inputs_of_a_step(group) for group in steps} == steps


def multiply(rows, outputs, inputs, dtype):
    """Launch the product of a linear layer whose checkpoint has blocks of 128."""
    x, weight = (meta(n, inputs, dtype=triton_fp8.FP8) for n in (rows, outputs))
    scales = [meta(n, inputs // 128, dtype=torch.float32) for n in (rows, outputs)]
    counters = triton_fp8.new_counters(len(weight), weight.device)
    triton_fp8.multiply(x, scales[0], weight, scales[1], 128, dtype, counters)


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "dtype"),
    [
        (1, 4096, 1024, torch.bfloat16),
        pytest.param(64, 24576, 4096, torch.bfloat16, marks=pytest.mark.long),
        pytest.param(4096, 4096, 12288, torch.bfloat16, marks=pytest.mark.long),
        (64, 1024, 3072, torch.float16),
    ],
    ids=str,
)
def test_compiles(rows, outputs, inputs, dtype):
    """For GPUs that are not present, at shapes of Qwen3-0.6B and 8B; no register is spilled."""
    x = meta(rows, inputs, dtype=dtype)
    compiled = compile_launches(
        (triton_fp8.quantize, x, 128), (multiply, rows, outputs, inputs, dtype), archs=FP8_ARCHS
    )
    assert list(compiled) == list(FP8_ARCHS)
    for kernels in compiled.values():
        assert [kernel.name for kernel in kernels] == ["_quantize_fp8", "_multiply_fp8"]
        for kernel in kernels:
            assert kernel.n_spills == 0, kernel
            assert kernel.shared <= 227 * 1024, kernel
        assert 0 < kernels[0].n_regs <= 128, kernels[0]
