"""The kernels of a step, from a trace of torch.profiler: idle time, and each kind's share.

Analysis is pure; only `profile` needs torch and a GPU.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

Result = TypeVar("Result")

PAUSE = 5e-6
"""Seconds. In a longer gap the GPU waits for the host, not for its next kernel."""

KINDS = {
    "attention": r"^_decode|^_prefill|^_plan_decode|flash|fmha|attention",
    "sampler": r"^_reduce_blocks|^_choose",
    "norm, activation, store": r"^_add_rms_norm|^_silu_and_mul|^_store|^_quantize_fp8",
    "step state": r"^_gather|^_advance",
    "GEMM": r"^_multiply_fp8|gemm|gemv|nvjet|cutlass|cublas|splitk|xmma",
    "drafts": r"^_find|^_copy",
    "copies": r"^memcpy|^memset",
}
"""Patterns of kernel names, by kind of work. The first match counts; without one it is "other"."""


class Kernel(NamedTuple):
    """One piece of GPU work. `start` and `end` are in seconds."""

    name: str
    start: float
    end: float


class Idle(NamedTuple):
    """Shares of a span in which the GPU runs nothing."""

    all: float
    paused: float
    """In gaps longer than PAUSE."""


def profile(work: Callable[[], Result], trace: Path) -> tuple[Result, list[Kernel]]:
    """Run `work` and return its result and the GPU's kernels. `trace` is a temporary file.

    The profiler watches every kernel of a CUDA graph, which slows the graph down.
    """
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        result = work()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(trace))
    kernels = kernels_of_trace(json.loads(trace.read_text()))
    trace.unlink()
    return result, kernels


def kernels_of_trace(trace: Mapping[str, Any]) -> list[Kernel]:
    """Return the kernels, copies and fills of a Chrome trace, sorted by start."""
    kernels = [
        Kernel(event["name"], event["ts"] * 1e-6, (event["ts"] + event["dur"]) * 1e-6)
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    return sorted(kernels, key=lambda kernel: kernel.start)


def settled(kernels: Sequence[Kernel], skip: float = 0.2) -> list[Kernel]:
    """Return the kernels after the first `skip` of the span, in which the profiler starts."""
    if not kernels:
        return []
    first, last = kernels[0].start, max(kernel.end for kernel in kernels)
    return [kernel for kernel in kernels if kernel.start >= first + skip * (last - first)]


def idle(kernels: Sequence[Kernel]) -> Idle:
    """Return the idle shares of the span from the first start to the last end.

    `kernels` are sorted by start and may overlap.
    """
    assert kernels, "no GPU work in the trace"
    first = until = kernels[0].start
    gaps = []
    for kernel in kernels:
        gaps.append(max(kernel.start - until, 0.0))
        until = max(until, kernel.end)
    span = until - first
    return Idle(sum(gaps) / span, sum(gap for gap in gaps if gap > PAUSE) / span)


def kind_of(name: str) -> str:
    """Return the kind of work of a kernel, by its name."""
    found = (kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE))
    return next(found, "other")


def shares(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Return each kind's share of the span, and the idle share."""
    idle_share = idle(kernels).all
    span = max(kernel.end for kernel in kernels) - kernels[0].start
    seconds = dict.fromkeys([*KINDS, "other"], 0.0)
    for kernel in kernels:
        seconds[kind_of(kernel.name)] += kernel.end - kernel.start
    return {**{kind: value / span for kind, value in seconds.items()}, "idle": idle_share}
