"""Part `packed`: products with weights of 4 bits, packed and widened first, beside bfloat16.

Each is timed in a CUDA graph of as many products as the model has layers, each with weights of its
own, so that none finds them in the L2 cache.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.gpu.bandwidth import gpu_seconds
from benchmarks.gpu.launches import captured
from benchmarks.gpu.matrices import LAYERS, SHAPES, table_of_times
from benchmarks.gpu.part import Part, Record

ROWS = (1, 16, 64, 256, 2048)
GROUPS = (32, 128)
WIDENED, CUBLAS = "widened, then cuBLAS", "cuBLAS, bf16"


def packed(record: Record) -> None:
    """Time each way at each shape and number of rows."""
    import torch

    for shape, (outputs, inputs) in SHAPES.items():
        weights = torch.empty(LAYERS, outputs, inputs, dtype=torch.bfloat16, device="cuda")
        weights.uniform_(-0.035, 0.035)
        methods = ways(weights)
        for rows in ROWS:
            if not record.has_time(2, f"{shape} at {rows} rows"):
                continue
            x = torch.randn(rows, inputs, dtype=torch.bfloat16, device="cuda")
            for way, (products, num_bytes) in methods.items():
                label = {"shape": shape, "rows": rows, "way": way}
                work = functools.partial(time_products, products, x, num_bytes)
                record.attempt("times", label, work)
        del weights, methods


def ways(weights: Any) -> dict[str, tuple[list[Callable[[Any], Any]], int]]:
    """Return by way what multiplies with each of `weights` [layers, n, k], and a weight's bytes."""
    import torch

    from nanovllm.features.quantization.integer import IntRows, IntWeight, quantize
    from nanovllm.kernels.triton.kernels import TritonKernels

    kernels = TritonKernels()
    found: dict[str, tuple[list[Callable[[Any], Any]], int]] = {}
    for group in GROUPS:
        ints = [quantize(weight, 4, group) for weight in weights]
        num_bytes = weights[0].numel() // 2 + ints[0].scales.nbytes
        triton = [IntRows(len(weight.values), weights.dtype, kernels) for weight in ints]
        for rows, weight in zip(triton, ints, strict=True):
            rows.store(0, weight)
        found[f"Triton, groups of {group}"] = [rows.method().apply for rows in triton], num_bytes
        if group == GROUPS[-1]:
            torchs = [IntWeight(weight, weights.dtype) for weight in ints]
            found[WIDENED] = [method.apply for method in torchs], num_bytes
    multiply = torch.nn.functional.linear
    found[CUBLAS] = [functools.partial(multiply, weight=w) for w in weights], weights[0].nbytes
    return found


def time_products(products: list[Callable[[Any], Any]], x: Any, num_bytes: int) -> dict[str, Any]:
    """Return the seconds of one product, and the bytes of its weight."""

    def run() -> None:
        for multiply in products:
            multiply(x)

    graph = captured(run)
    return {"seconds": gpu_seconds(graph.replay, repeat=10) / len(products), "bytes": num_bytes}


def lines(figures: Mapping[str, Any], bandwidth: Mapping[str, Any]) -> list[str]:
    """Return a table of times by way and rows."""
    return table_of_times(figures, bandwidth, ROWS)


PART = Part(packed, 40, "Products with weights of 4 bits", lines)
