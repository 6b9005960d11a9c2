"""Part `step`: the kernels of one decode step with durations and gaps, and idle time, by batch."""

import functools
from collections.abc import Mapping
from typing import Any

from benchmarks.gpu.engines import (
    BATCHES,
    decoding,
    make_engine,
    pool_bytes,
    step_seconds,
)
from benchmarks.gpu.part import Part, Record, percent, table
from benchmarks.gpu.trace import by_name, idle, one_step, profile, settled, shares
from benchmarks.shapes import SMALL

LENGTH = 600
_STEPS = 32
"""Steps that the profiler watches."""


def step(record: Record) -> None:
    """Time the steps of each batch, then profile them."""
    pool = pool_bytes(SMALL, max(BATCHES), LENGTH)
    engine = make_engine(record, SMALL, max_num_seqs=max(BATCHES), kv_cache_memory_bytes=pool)
    seconds_of = {}
    # All before the first profile: the profiler stays attached to the GPU and slows it.
    for batch in BATCHES:
        with decoding(engine, batch, LENGTH):
            seconds_of[batch] = step_seconds(engine, batch, 96)
        record.add("unprofiled", {"batch": batch, "seconds": seconds_of[batch]})
    for batch, seconds in seconds_of.items():
        if not record.has_time(5, f"the profile of batch {batch}"):
            continue
        run = functools.partial(step_seconds, engine, batch, _STEPS)
        with decoding(engine, batch, LENGTH):
            profiled, kernels = profile(run, record.scratch / "step-trace.json")
        if not kernels:
            record.add("unprofiled", {"batch": batch, "error": "the profiler saw no kernel"})
            continue
        window = settled(kernels)
        idle_shares = idle(window)
        row: dict[str, Any] = {
            "batch": batch,
            "seconds": seconds,
            "profiled": profiled,
            "idle": idle_shares.all,
            "paused": idle_shares.paused,
            "shares": shares(window),
        }
        in_window = round(_STEPS * len(window) / len(kernels))
        try:
            nodes = one_step(window, in_window)
            row |= {"kernels": len(nodes), "names": by_name(nodes), "nodes": nodes}
        except ValueError as error:
            row |= {"kernels": len(kernels) / _STEPS, "names": [], "error": str(error)}
        record.add("steps", row)


def lines(figures: Mapping[str, Any], bandwidth: Mapping[str, Any]) -> list[str]:
    """Return a table of idle times, and for each batch one of a step's kernels."""
    text = []
    profiles = figures.get("steps", [])
    if not profiles:
        rows = [
            [row["batch"], row.get("error") or f"{1e3 * row['seconds']:.3f}"]
            for row in figures["unprofiled"]
        ]
        return table(["batch", "ms a step"], rows)
    head = ["batch", "ms a step", "profiled", "kernels", "idle", "in gaps over 5 us", "largest"]
    text += table(head, map(idle_cells, profiles))
    for row in profiles:
        text += ["", f"A step at batch {row['batch']}, about {LENGTH} tokens a row:", ""]
        if "error" in row:
            text.append(row["error"])
            continue
        text += table(["kernel", "times", "us each", "gap before", "us a step"], cells(row))
    return text


def cells(row: Mapping[str, Any]) -> list[list[object]]:
    """Return the rows of a table of kernels, and their sum."""
    found: list[list[object]] = []
    for kernel in row["names"]:
        count, seconds, gap = kernel["count"], kernel["seconds"], kernel["gaps"]
        each = [f"{1e6 * value:.2f}" for value in (seconds / count, gap / count, seconds + gap)]
        found.append([f"`{kernel['name'][:70]}`", count, *each])
    busy = sum(kernel["seconds"] for kernel in row["names"])
    waits = sum(kernel["gaps"] for kernel in row["names"])
    sums = [f"{1e6 * value:.2f}" for value in (busy, waits, busy + waits)]
    return [*found, ["sum", row["kernels"], *sums]]


def idle_cells(row: Mapping[str, Any]) -> list[object]:
    """Return the cells of a row of the table of idle times."""
    busy = ((kind, share) for kind, share in row["shares"].items() if kind != "idle")
    largest = sorted(busy, key=lambda item: -item[1])[:4]
    return [
        row["batch"],
        f"{1e3 * row['seconds']:.3f}",
        f"{1e3 * row['profiled']:.3f}",
        f"{row['kernels']:.0f}",
        percent(row["idle"], 1),
        percent(row["paused"], 1),
        ", ".join(f"{kind} {percent(share)}" for kind, share in largest),
    ]


PART = Part(step, 35, "The kernels of a step", lines)
