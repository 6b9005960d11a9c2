"""The kernels that only benchmarks.gpu has: interpreted they compute what they should, and they
compile for Hopper, with dependent launches and prefetches, without spills.
"""

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.gpu import attention, launches, matrices, micro_kernels, packed
from nanovllm.attention.spec import AttentionSpec
from nanovllm.attention.triton import TritonBackend
from tests.kernels.triton.harness import compile_launches
from tests.kernels.triton.inputs import CUDA, DEVICE, each_dtype, randn
from tests.kernels.triton.interpreter import patch_interpreter

patch_interpreter()
ARCHS = (90,)
"""Hopper, with which dependent launches came."""
PROCESSORS = 132


@each_dtype
@pytest.mark.parametrize("rows", [1, 16, 40])
def test_linear_against_float64(rows: int, dtype: torch.dtype) -> None:
    x, w = randn(rows, 1024, dtype=dtype), randn(64, 1024, dtype=dtype, seed=1)
    splits = micro_kernels.num_splits(64, 1024, PROCESSORS)
    assert splits == 8
    out = torch.full((splits, rows, 64), torch.nan, device=DEVICE)
    micro_kernels.linear(x, w, out, False, False)
    exact = x.double() @ w.double().T
    # Of float32, TF32 keeps 10 bits; products of 16 bits are exact in float32.
    limit = 2e-3 if dtype == torch.float32 and CUDA else 1e-5
    assert (out.double().sum(0) - exact).abs().max() <= limit * exact.abs().max()


@pytest.mark.parametrize("shape", matrices.SHAPES)
def test_splits_fill_the_gpu_and_divide_the_inputs(shape: str) -> None:
    outputs, inputs = matrices.SHAPES[shape]
    splits = micro_kernels.num_splits(outputs, inputs, PROCESSORS)
    assert outputs // 32 * splits >= 1.5 * PROCESSORS
    assert inputs % (splits * 128) == 0


def test_tiny_adds_1() -> None:
    x = randn(3 * micro_kernels.TINY_SIZE)
    y = torch.empty_like(x)
    micro_kernels.tiny(x, y, 0)
    assert torch.equal(y, x + 1)


@pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU: the interpreter runs one program at a time")
def test_all_programs_meet() -> None:
    counter = torch.full((1,), 5, dtype=torch.int32, device=DEVICE)
    micro_kernels.barriers(counter, 8, 7)
    assert counter.item() == 56


@pytest.mark.skipif(CUDA, reason="interpreted, which a GPU turns off")
@pytest.mark.parametrize("case", [attention.Case(2, 1, 70), attention.Case(2, 3, 70)])
def test_batches_of_attention_are_what_a_backend_takes(case: attention.Case) -> None:
    spec = AttentionSpec(4, 2, 32, torch.float16, DEVICE, None)
    backend: Any = TritonBackend(spec)
    batch, num_blocks = attention.make_batch(backend, case)
    assert num_blocks == 4
    assert sorted(batch.block_tables[:, :2].flatten().tolist()) == [0, 1, 2, 3]
    cache = randn(*backend.kv_cache_shape(num_blocks), dtype=torch.float16)
    q = randn(case.rows * case.tokens, 4, 32, dtype=torch.float16, seed=1)
    out = backend.attend(q, cache, dataclasses.replace(batch, metadata=backend.plan(batch)))
    keys, values = (
        part[batch.block_tables[0, :2].long()].flatten(0, 1)[: case.length, 0].double()
        for part in cache
    )
    weights = (keys @ q[case.tokens - 1, 0].double() / 32**0.5).softmax(0)
    assert (out[case.tokens - 1, 0].double() - weights @ values).abs().max() < 2e-3


def test_they_compile() -> None:
    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    numbers = meta(micro_kernels.TINY_SIZE, dtype=torch.float32)
    calls: list[tuple[object, ...]] = [
        (micro_kernels.tiny, numbers, numbers, launch) for launch in launches.LAUNCHES.values()
    ]
    calls.append((micro_kernels.barriers, meta(1, dtype=torch.int32), PROCESSORS, 3))
    ways = [tuple(options.values()) for options in matrices.TRITON_WAYS.values()]
    for rows, way in [*((1, way) for way in ways), (256, ways[-1])]:
        out = meta(2, rows, 4096, dtype=torch.float32)
        calls.append((micro_kernels.linear, meta(rows, 1024), meta(4096, 1024), out, *way))
    for kernels in compile_launches(*calls, archs=ARCHS).values():
        assert len(kernels) == len(calls)
        for kernel in kernels:
            assert kernel.n_spills == 0, kernel


@pytest.mark.skipif(CUDA, reason="interpreted, which a GPU turns off")
def test_products_with_packed_weights_agree() -> None:
    weights = randn(2, 40, 256, dtype=torch.float16)
    methods = packed.ways(weights)
    x = randn(3, 256, dtype=torch.float16, seed=1)
    exact = x.double() @ weights[1].double().T
    for way, (products, num_bytes) in methods.items():
        error = (products[1](x).double() - exact).abs().max() / exact.abs().max()
        assert error < (1e-3 if way == packed.CUBLAS else 0.2)
        assert len(products) == 2
        assert num_bytes <= (40 * 256 * 2 if way == packed.CUBLAS else 40 * 256 * 9 // 16)
    triton, widened = (methods[way][0][1](x) for way in ("Triton, groups of 128", packed.WIDENED))
    assert (triton - widened).abs().max() <= 2.0**-9 * widened.abs().max()
