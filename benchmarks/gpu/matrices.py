"""Part `matrices`: the products of a layer by cuBLAS, cuBLASLt and Triton, and how exact they are.

Each is timed in a CUDA graph of as many products as the model has layers, each with weights of its
own, so that none finds them in the L2 cache.
"""

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bench import QWEN3_06B
from benchmarks.gpu.bandwidth import gpu_seconds
from benchmarks.gpu.launches import captured
from benchmarks.gpu.part import Part, Record
from benchmarks.gpu.tables import percent, table

LAYERS: Any = QWEN3_06B["num_hidden_layers"]
SHAPES = {
    "qkv": (4096, 1024),
    "o": (1024, 2048),
    "gate_up": (6144, 1024),
    "down": (1024, 3072),
}
"""Outputs and inputs of the linear layers of Qwen3-0.6B."""
ROWS = (1, 16, 128, 256)
REDUCTIONS: dict[str, tuple[str, Any]] = {
    "cuBLAS, bf16 reductions": ("cublas", True),
    "cuBLAS, float32 reductions": ("cublas", False),
    "cuBLASLt, float32 reductions, no split K": ("cublaslt", (False, False)),
}
"""Arguments of `using`."""
FUSED = "nanovllm.kernels.triton.fused_layer"
TRITON_WAYS = {
    "Triton": {"dependent": False, "prefetch": False},
    "Triton, dependent launch": {"dependent": True, "prefetch": False},
    "Triton, dependent launch, prefetch": {"dependent": True, "prefetch": True},
}
"""Arguments of `micro_kernels.linear`."""


def matrices(record: Record) -> None:
    """Time each way at each shape, then compare cuBLAS with float64."""
    import torch

    for shape, (outputs, inputs) in SHAPES.items():
        weights = torch.empty(LAYERS, outputs, inputs, dtype=torch.bfloat16, device="cuda")
        weights.uniform_(-0.035, 0.035)
        for rows in ROWS:
            if not record.has_time(8, f"{shape} at {rows} rows"):
                continue
            x = torch.randn(rows, inputs, dtype=torch.bfloat16, device="cuda")
            for way, run in ways(x, weights).items():
                label = {"shape": shape, "rows": rows, "way": way}
                record.attempt("times", label, functools.partial(time_products, run, weights))
        x = torch.randn(max(ROWS), inputs, dtype=torch.bfloat16, device="cuda")
        for name, settings in REDUCTIONS.items():
            label = {"shape": shape, "reductions": name}
            record.attempt("errors", label, functools.partial(errors, x, weights[0], *settings))
        del weights


@contextlib.contextmanager
def using(library: str, reductions: Any) -> Iterator[None]:
    """Let torch multiply with `library`.

    Args:
        reductions: allow_bf16_reduced_precision_reduction of torch.backends.cuda.matmul.
    """
    import torch

    matmul, choose = torch.backends.cuda.matmul, torch.backends.cuda.preferred_blas_library
    before, reduced = choose(), matmul.allow_bf16_reduced_precision_reduction
    choose(library)
    try:
        matmul.allow_bf16_reduced_precision_reduction = reductions
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction = reduced
        choose(before)


def ways(x: Any, weights: Any) -> dict[str, Callable[[], None]]:
    """Return for each way what multiplies `x` with each of `weights`."""
    import torch

    from benchmarks.gpu.micro_kernels import linear, num_splits

    processors = torch.cuda.get_device_properties(0).multi_processor_count
    outputs, inputs = weights.shape[1:]

    def library(name: str, reductions: bool = True) -> Callable[[], None]:
        out = torch.empty(len(x), outputs, dtype=x.dtype, device=x.device)

        def run() -> None:
            with using(name, reductions):
                for weight in weights:
                    torch.mm(x, weight.T, out=out)

        return run

    def ours(options: dict[str, bool]) -> Callable[[], None]:
        splits = num_splits(outputs, inputs, processors) if len(x) <= 16 else 1
        out = torch.empty(splits, len(x), outputs, device=x.device)

        def run() -> None:
            for weight in weights:
                linear(x, weight, out, **options)

        return run

    found = {
        "cuBLAS": library("cublas"),
        "cuBLAS, float32 reductions": library("cublas", False),
        "cuBLASLt": library("cublaslt"),
    }
    found |= {name: ours(options) for name, options in TRITON_WAYS.items()}
    return found | (fused_ways(x, weights) if len(x) <= 16 else {})


def fused_ways(x: Any, weights: Any) -> dict[str, Callable[[], None]]:
    """Return the same for the product of the package's fused kernels, if it has them."""
    if importlib.util.find_spec(FUSED) is None:
        return {}
    fused = importlib.import_module(FUSED)

    def run(chained: bool) -> None:
        for weight in weights:
            fused.linear_partials(x, weight, chained=chained)

    names = {"fused_layer": False, "fused_layer, chained": True}
    return {name: functools.partial(run, chained) for name, chained in names.items()}


def time_products(run: Callable[[], None], weights: Any) -> dict[str, Any]:
    """Return the seconds of one product, and the bytes of its weights."""
    graph = captured(run)
    seconds = gpu_seconds(graph.replay, repeat=10) / len(weights)
    return {"seconds": seconds, "bytes": weights[0].nbytes}


def errors(x: Any, weight: Any, library: str, reductions: Any) -> dict[str, Any]:
    """Return by number of rows the largest error against float64, relative to the largest output;
    and the numbers of rows at which row 0 has the bits that it has alone.
    """
    import torch

    exact = x.double() @ weight.double().T
    with using(library, reductions):
        products = {rows: torch.nn.functional.linear(x[:rows], weight) for rows in ROWS}
    return {
        "errors": {
            str(rows): float((found.double() - exact[:rows]).abs().max() / exact.abs().max())
            for rows, found in products.items()
        },
        "same_bits": [
            rows for rows, found in products.items() if torch.equal(found[0], products[1][0])
        ],
    }


def table_of_times(
    figures: Mapping[str, Any], bandwidth: Mapping[str, Any], counts: tuple[int, ...]
) -> list[str]:
    """Return a table of times by shape and way, for each number of rows."""
    copy = bandwidth.get("copy")
    by_way: dict[tuple[str, str], dict[int, str]] = {}
    for row in figures.get("times", []):
        cell = row.get("error")
        if cell is None:
            rate = row["bytes"] / row["seconds"]
            cell = f"{1e6 * row['seconds']:.2f} ({percent(copy and rate / copy)})"
        by_way.setdefault((row["shape"], row["way"]), {})[row["rows"]] = cell
    head = ["us a product (of the copy's rate)", "by", *(f"{count} rows" for count in counts)]
    return table(
        head, ([*key, *(found.get(rows, "–") for rows in counts)] for key, found in by_way.items())
    )


def lines(figures: Mapping[str, Any], bandwidth: Mapping[str, Any]) -> list[str]:
    """Return a table of times by way and rows, and one of errors."""
    text = table_of_times(figures, bandwidth, ROWS)
    text += ["", "Triton's times are without the sum of the partial results of split K.", ""]
    rows = []
    for row in figures.get("errors", []):
        cells = [row["shape"], row["reductions"]]
        if "error" in row:
            rows.append([*cells, row["error"], *[""] * len(ROWS)])
            continue
        cells += [f"{row['errors'][str(count)]:.1e}" for count in ROWS]
        rows.append([*cells, ", ".join(map(str, row["same_bits"]))])
    head = ["error against float64", "by", *(f"{count} rows" for count in ROWS)]
    return text + table([*head, "row 0 as alone at"], rows)


PART = Part(matrices, 100, "Products of a layer", lines)
