"""Part `launches`: what a kernel costs in a graph, with and without dependent launch, and what a
barrier of all processors costs.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.gpu.bandwidth import gpu_seconds
from benchmarks.gpu.part import Part, Record
from benchmarks.gpu.tables import table

KERNELS = 200
"""In a graph, each reading what the one before wrote."""
BARRIERS = 200
LAUNCHES = {
    "plain": 0,
    "dependent, next one may start after reading": 1,
    "dependent, next one may start at once": 2,
}
"""Names of the values of `launch` in `micro_kernels.tiny`."""


def launches(record: Record) -> None:
    """Time graphs of tiny kernels, then barriers."""
    import torch

    processors = torch.cuda.get_device_properties(0).multi_processor_count
    record.figures["processors"] = processors
    for programs in (1, processors):
        for name, launch in LAUNCHES.items():
            label = {"launch": name, "programs": programs}
            record.attempt("nodes", label, functools.partial(time_nodes, programs, launch))
    for programs in (processors, 2 * processors):
        label = {"programs": programs}
        record.attempt("barriers", label, functools.partial(time_barriers, programs))


def time_nodes(programs: int, launch: int) -> dict[str, Any]:
    """Return the seconds of a kernel in a graph of KERNELS, and whether they computed it."""
    import torch

    from benchmarks.gpu.micro_kernels import TINY_SIZE, tiny

    x = torch.zeros(programs * TINY_SIZE, device="cuda")
    y = torch.zeros_like(x)

    def chain() -> None:
        for _ in range(KERNELS // 2):
            tiny(x, y, launch)
            tiny(y, x, launch)

    graph = captured(chain)
    x.zero_()
    graph.replay()
    torch.cuda.synchronize()
    right = bool((x == KERNELS).all())
    return {"seconds": gpu_seconds(graph.replay, repeat=20) / KERNELS, "right": right}


def time_barriers(programs: int) -> dict[str, Any]:
    """Return the seconds of one barrier."""
    import torch

    from benchmarks.gpu.micro_kernels import barriers

    counter = torch.zeros(1, dtype=torch.int32, device="cuda")
    none, many = (
        gpu_seconds(functools.partial(barriers, counter, programs, count))
        for count in (0, BARRIERS)
    )
    return {"seconds": (many - none) / BARRIERS}


def captured(work: Callable[[], object]) -> Any:
    """Return a CUDA graph of `work`, which runs once before, to compile its kernels."""
    import torch

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def lines(figures: Mapping[str, Any], bandwidth: Mapping[str, Any]) -> list[str]:
    """Return a table of kernels in a graph, and one of barriers."""
    text = [f"{KERNELS} kernels in a graph, each reads what the one before wrote:", ""]
    rows = []
    for row in figures.get("nodes", []):
        cells = [row["launch"], row["programs"]]
        if "error" in row:
            rows.append([*cells, row["error"], ""])
        else:
            rows.append([*cells, f"{1e6 * row['seconds']:.2f}", "yes" if row["right"] else "no"])
    text += table(["launch", "programs", "us a kernel", "right result"], rows)
    rows = [
        [row["programs"], row.get("error") or f"{1e6 * row['seconds']:.2f}"]
        for row in figures.get("barriers", [])
    ]
    text += ["", *table(["programs that meet", "us a barrier"], rows)]
    return text


PART = Part(launches, 45, "Kernels in a graph, and barriers", lines)
