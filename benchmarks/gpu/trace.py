"""The kernels of a step, from a trace of torch.profiler: their durations, the gaps, idle time.

Analysis is pure; only `profile` needs torch and a GPU.
"""

import functools
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

from benchmarks.gpu.part import ROOT

Result = TypeVar("Result")

PAUSE = 5e-6
"""Seconds. In a longer gap the GPU waits for the host, not for its next kernel."""

KINDS = {
    "attention of others": r"flash|fmha|attention",
    "GEMM": r"gemm|gemv|nvjet|cutlass|cublas|splitk|xmma",
    "copies": r"^memcpy|^memset",
}
"""Patterns of the names of kernels that are not ours, by kind of work. The first match counts;
without one it is "other".
"""
_COPIES = ("gpu_memcpy", "gpu_memset")


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


class Node(NamedTuple):
    """One kernel of a step; the numbers are means over steps, in seconds."""

    name: str
    duration: float
    gap: float
    """From the end of all kernels before it to its start; negative where they overlap."""


def profile(work: Callable[[], Result], trace: Path) -> tuple[Result, list[Kernel]]:
    """Run `work` and return its result and the GPU's kernels. `trace` is a temporary file.

    The profiler watches every kernel of a CUDA graph, which slows the graph down.
    """
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        result = work()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(trace))
    kernels = kernels_of_trace(json.loads(trace.read_text(encoding="utf-8")))
    trace.unlink()
    return result, kernels


def kernels_of_trace(trace: Mapping[str, Any]) -> list[Kernel]:
    """Return the kernels, copies and fills of a Chrome trace, sorted by start."""
    kernels = [
        Kernel(event["name"], event["ts"] * 1e-6, (event["ts"] + event["dur"]) * 1e-6)
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in ("kernel", *_COPIES)
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
    span = max(kernel.end for kernel in kernels) - kernels[0].start
    waits = [max(gap, 0.0) for gap in gaps(kernels)]
    return Idle(sum(waits) / span, sum(gap for gap in waits if gap > PAUSE) / span)


def gaps(kernels: Iterable[Kernel]) -> list[float]:
    """Return for each kernel the seconds since all kernels before it had ended; 0 for the first."""
    found: list[float] = []
    until = None
    for kernel in kernels:
        found.append(0.0 if until is None else kernel.start - until)
        until = kernel.end if until is None else max(until, kernel.end)
    return found


def one_step(kernels: Sequence[Kernel], steps: int) -> list[Node]:
    """Return the kernels of one of about `steps` equal steps, in order.

    A step begins with a kernel that runs once in each, and of these with the one that is waited for
    longest. The result is that of the most common sequence of kernels: a step that also uploads new
    blocks does not count.

    Raises:
        ValueError: no kernel runs once a step.
    """
    waits: dict[str, float] = {}
    counts = Counter(kernel.name for kernel in kernels)
    all_gaps = gaps(kernels)
    for kernel, gap in zip(kernels, all_gaps, strict=True):
        if abs(counts[kernel.name] - steps) <= max(1, steps // 10):
            waits[kernel.name] = waits.get(kernel.name, 0.0) + gap
    if not waits:
        raise ValueError(f"no kernel runs once in each of {steps} steps")
    first = max(waits, key=waits.__getitem__)
    starts = [index for index, kernel in enumerate(kernels) if kernel.name == first]
    by_names: dict[tuple[str, ...], list[range]] = {}
    for start, stop in itertools.pairwise(starts):
        names = tuple(kernel.name for kernel in kernels[start:stop])
        by_names.setdefault(names, []).append(range(start, stop))
    if not by_names:
        raise ValueError(f"the trace has no whole step that begins with {first}")
    names, places = max(by_names.items(), key=lambda item: len(item[1]))
    return [
        Node(
            name,
            fmean(kernels[place[at]].end - kernels[place[at]].start for place in places),
            fmean(all_gaps[place[at]] for place in places),
        )
        for at, name in enumerate(names)
    ]


def by_name(step: Iterable[Node]) -> list[dict[str, Any]]:
    """Return a row for each kernel of a step in order of appearance; seconds are sums of a step."""
    rows: dict[str, dict[str, Any]] = {}
    for node in step:
        row = rows.setdefault(node.name, {"name": node.name, "count": 0, "seconds": 0.0, "gaps": 0})
        row["count"] += 1
        row["seconds"] += node.duration
        row["gaps"] += node.gap
    return list(rows.values())


def kind_of(name: str) -> str:
    """Return the kind of work of a kernel by its name: for ours, the module that has it."""
    if name in own_kernels():
        return own_kernels()[name]
    found = (kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE))
    return next(found, "other")


@functools.cache
def own_kernels() -> dict[str, str]:
    """Return the modules of nanovllm/kernels/triton by the names of their kernels."""
    found = {}
    for path in sorted((ROOT / "nanovllm" / "kernels" / "triton").glob("*.py")):
        source = path.read_text(encoding="utf-8")
        for name in re.findall(r"^def (_\w+)\(", source, re.MULTILINE):
            found[name] = path.stem.replace("_", " ")
    return found


def shares(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Return each kind's share of the span, and the idle share."""
    idle_share = idle(kernels).all
    span = max(kernel.end for kernel in kernels) - kernels[0].start
    seconds: dict[str, float] = {}
    for kernel in kernels:
        kind = kind_of(kernel.name)
        seconds[kind] = seconds.get(kind, 0.0) + kernel.end - kernel.start
    return {**{kind: value / span for kind, value in seconds.items()}, "idle": idle_share}
