"""Part `single`: one sequence's latency by queue depth, and the GPU's idle time by batch size."""

import functools
from collections.abc import Mapping
from typing import Any

from benchmarks.gpu.engines import (
    BATCHES,
    decoding,
    make_engine,
    pool_bytes,
    release,
    step_seconds,
)
from benchmarks.gpu.floors import step_bytes
from benchmarks.gpu.part import Part, Record
from benchmarks.gpu.tables import percent, table
from benchmarks.gpu.trace import idle, profile, settled, shares
from benchmarks.shapes import CONFIGS, SMALL


def single(record: Record) -> None:
    """Measure latency, then idle time."""
    record.figures["model"] = SMALL
    for queue_depth in (1, 2, 4):
        measure_latency(record, queue_depth)
        release()
    measure_idle(record)


def measure_latency(record: Record, queue_depth: int) -> None:
    """Add the seconds of a token of one sequence, after a short and after a long context."""
    engine = make_engine(record, SMALL, queue_depth, max_num_seqs=1, kv_cache_memory_bytes=2**30)
    for length in (100, 3700):
        with decoding(engine, 1, length):
            seconds = step_seconds(engine, 1, 256)
        row = {"length": length, "queue_depth": queue_depth, "seconds": seconds}
        record.add("latency", row)
    engine.shutdown()


def measure_idle(record: Record) -> None:
    """Add the GPU's idle shares and its kernels' shares while it decodes, by batch size."""
    length, steps = 512, 40
    pool = pool_bytes(SMALL, max(BATCHES), length)
    engine = make_engine(record, SMALL, max_num_seqs=max(BATCHES), kv_cache_memory_bytes=pool)
    seconds_of = {}
    # All before the first profile: the profiler stays attached to the GPU and slows it.
    for batch in BATCHES:
        with decoding(engine, batch, length):
            seconds_of[batch] = step_seconds(engine, batch, 64)
        record.add("unprofiled", {"batch": batch, "seconds": seconds_of[batch]})
    for batch, seconds in seconds_of.items():
        run = functools.partial(step_seconds, engine, batch, steps)
        with decoding(engine, batch, length):
            profiled, kernels = profile(run, record.directory / "idle-trace.json")
        window = settled(kernels)
        idle_shares = idle(window)
        row: dict[str, Any] = {
            "batch": batch,
            "seconds": seconds,
            "profiled": profiled,
            "kernels": len(kernels) / steps,
            "idle": idle_shares.all,
            "paused": idle_shares.paused,
            "shares": shares(window),
        }
        record.add("idle", row)


def lines(figures: Mapping[str, Any], bandwidth: Mapping[str, Any]) -> list[str]:
    """Return a table of latencies against the floor, and one of idle times."""
    copy, config = bandwidth.get("copy"), CONFIGS[figures["model"]]
    rows = []
    for row in figures.get("latency", []):
        floor = copy and step_bytes(config, 1, row["length"]) / copy
        ms = "–" if floor is None else f"{1e3 * floor:.3f}"
        of = percent(floor and floor / row["seconds"])
        rows.append([row["length"], row["queue_depth"], f"{1e3 * row['seconds']:.3f}", ms, of])
    text = table(["context", "queue depth", "ms a token", "floor", "of the floor"], rows)
    profiles = figures.get("idle", [])
    if profiles:
        text += ["", "Idle while decoding, from a trace of the steady window:", ""]
        head = ["batch", "ms a step", "profiled", "kernels", "idle", "in gaps over 5 us", "largest"]
        text += table(head, map(idle_cells, profiles))
    return text


def idle_cells(row: Mapping[str, Any]) -> list[object]:
    """Return the cells of a row of the table of idle times."""
    largest = sorted(row["shares"].items(), key=lambda item: -item[1])[:4]
    return [
        row["batch"],
        f"{1e3 * row['seconds']:.3f}",
        f"{1e3 * row['profiled']:.3f}",
        f"{row['kernels']:.0f}",
        percent(row["idle"], 1),
        percent(row["paused"], 1),
        ", ".join(f"{kind} {percent(share)}" for kind, share in largest),
    ]


PART = Part(single, 70, "One sequence, and idle time", lines)
