"""What each form of 8-bit and 4-bit weights costs in a model's linears on a CPU, against our int4.

All linears of the layers run as one recorded call, in the shape of Qwen3-0.6B, with random weights.
The forms run in turn. The ratio in the last column is the median over rounds of a form's time
divided by int4's in the same round.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch

from benchmarks.comparison import processor_name
from benchmarks.shapes import CONFIGS, SMALL
from nanovllm.formats.integer import IntRows, IntTensor
from nanovllm.kernels.cpu.kernels import CKernels
from nanovllm.kernels.torch_kernels import WeightMethod
from nanovllm.steps.recording import Recording

BASE = "int4, groups of 32"
FORMS: dict[str, tuple[int, int | None, set[str]]] = {
    BASE: (4, 32, set()),
    "int4, groups of 32, minimums": (4, 32, {"minimums"}),
    "W4A16, groups of 32, zeros": (4, 32, {"zeros"}),
    "W4A16, groups of 128": (4, 128, set()),
    "W4A16, groups of 128, zeros": (4, 128, {"zeros"}),
    "W4A16, groups of 128, act order": (4, 128, {"inputs"}),
    "W4A16, a channel": (4, None, {"factors"}),
    "NVFP4": (4, 16, {"fp4", "factors"}),
    "MXFP4": (4, 32, {"fp4"}),
    "int8, groups of 128": (8, 128, set()),
    "W8A16, groups of 128, zeros": (8, 128, {"zeros"}),
    "W8A16, a channel": (8, None, {"factors"}),
}
"""Bits, inputs that share a scale (None: a row), and what else the weight has."""


def shapes_of(model: str) -> list[tuple[int, int]]:
    """Return the outputs and inputs of a layer's linears, as the engine merges them."""
    config = CONFIGS[model]
    hidden, size, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    qkv = (heads + 2 * kv_heads) * dim
    return [(qkv, hidden), (hidden, heads * dim), (2 * size, hidden), (hidden, size)]


def random_weight(form: tuple[int, int | None, set[str]], n: int, k: int) -> IntTensor:
    """Return a weight [n, k] of the given form."""
    bits, group, has = form
    groups = k // (group or k)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)

    def numbers(name: str, like: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        return like() if name in has else None

    scales = torch.rand(n, groups) + 0.5
    return IntTensor(
        torch.randint(low, high, (n, k), dtype=torch.int8),
        scales.bfloat16() if "fp4" in has else scales.half(),
        numbers("minimums", lambda: -8 * scales.half()),
        bits,
        numbers("zeros", lambda: torch.randint(low, high, (n, groups), dtype=torch.int8)),
        numbers("factors", lambda: torch.rand(n) + 0.5),
        numbers("inputs", lambda: torch.randperm(k, dtype=torch.int32)),
        "fp4" in has,
    )


def make_layers(
    form: tuple[int, int | None, set[str]], shapes: list[tuple[int, int]], num_layers: int
) -> list[WeightMethod]:
    """Return the linears of all layers. Layers have equal weights, each in separate memory."""
    weights = [random_weight(form, n, k) for n, k in shapes]
    layers = []
    for weight in weights * num_layers:
        rows = IntRows(len(weight.values), torch.bfloat16, CKernels())
        rows.store(0, weight)
        layers.append(rows.method())
    return layers


def megabytes(linears: list[WeightMethod]) -> float:
    """Return the bytes of the weights and their scales."""
    panels = [linear.panels for linear in linears]  # type: ignore[attr-defined]
    tensors = [t for p in panels for t in (p.packed, p.scales, p.factors, p.inputs)]
    total: int = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    return total / 1e6


def record(linears: list[WeightMethod], inputs: dict[int, torch.Tensor], rows: int) -> Recording:
    """Return a call of all `linears`, each with `rows` rows of inputs, by their number."""
    sizes = [k for _, k in shapes_of(SMALL)]
    with Recording(rows) as recording:
        for i, linear in enumerate(linears):
            linear.apply(inputs[sizes[i % len(sizes)]][:rows])
    return recording


def main() -> None:
    """Run the rounds and print a line for each form and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 256])
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--layers", type=int, default=CONFIGS[SMALL]["num_hidden_layers"])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()

    torch.manual_seed(0)
    names = [BASE, *(name for name in args.forms if name != BASE)]
    shapes = shapes_of(SMALL)
    inputs = {k: torch.randn(max(args.rows), k).bfloat16() for _, k in shapes}
    linears = {name: make_layers(FORMS[name], shapes, args.layers) for name in names}
    print(f"{processor_name()}, {torch.get_num_threads()} threads, {args.rounds} rounds")
    print(f"{'':34}{'rows':>6}{'MB':>8}{'ms':>10}{'of int4':>10}")
    for rows in args.rows:
        recordings = {name: record(linears[name], inputs, rows) for name in names}
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for round_ in range(args.rounds + 1):  # the first warms up
            for name, recording in recordings.items():
                start = time.perf_counter()
                recording.run(rows, rows)
                if round_:
                    seconds[name].append(time.perf_counter() - start)
        for name, times in seconds.items():
            ratio = median(t / base for t, base in zip(times, seconds[BASE], strict=True))
            size = megabytes(linears[name])
            print(f"{name:34}{rows:6}{size:8.0f}{1e3 * median(times):10.2f}{ratio:10.3f}")


if __name__ == "__main__":
    main()
