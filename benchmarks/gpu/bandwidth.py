"""Part `bandwidth`: what the GPU can do. Copies 4 GB, reads 4 GB into one number, and multiplies
matrices.
"""

from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from benchmarks.gpu.part import Part, Record, table

UNITS = {"copy": "B", "read": "B", "matmul": "FLOP"}


def bandwidth(record: Record) -> None:
    """Measure the rates of UNITS, each per second."""
    import torch

    source = torch.ones(2**31, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    record.figures["copy"] = 2 * source.nbytes / gpu_seconds(lambda: target.copy_(source))
    record.figures["read"] = source.nbytes / gpu_seconds(source.view(torch.float32).sum)
    size = 8192
    a = torch.randn(size, size, dtype=torch.bfloat16, device="cuda")
    record.figures["matmul"] = 2 * size**3 / gpu_seconds(lambda: a @ a.T)
    record.save()


def gpu_seconds(work: Callable[[], object], repeat: int = 5, samples: int = 5) -> float:
    """Return the median seconds of `work`; each sample is `repeat` launches between two events."""
    import torch

    for _ in range(3):
        work()
    times: list[float] = []
    for _ in range(samples):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(repeat):
            work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3 / repeat)
    return median(times)


def lines(figures: Mapping[str, Any], bandwidth: Mapping[str, Any]) -> list[str]:
    """Return a table of the rates."""
    rows = [[name, f"{figures[name] / 1e12:.2f} T{unit}/s"] for name, unit in UNITS.items()]
    return table(["measured", ""], rows)


PART = Part(bandwidth, 15, "What the GPU can do", lines)
