"""Part `single`: one sequence's time for a token, by context, queue depth and observers."""

from collections.abc import Mapping
from typing import Any

from benchmarks.gpu.engines import decoding, make_engine, release, step_seconds
from benchmarks.gpu.floors import step_bytes
from benchmarks.gpu.part import Part, Record, percent, table
from benchmarks.shapes import CONFIGS, SMALL


def single(record: Record) -> None:
    """Measure after a short and after a long context."""
    record.figures["model"] = SMALL
    trace = str(record.scratch / "single-trace.json")
    for queue_depth, observer in ((1, ""), (2, ""), (1, "trace")):
        if not record.has_time(15, f"queue depth {queue_depth} {observer}".strip()):
            continue
        observing = {"trace_file": trace} if observer else {}
        engine = make_engine(
            record, SMALL, queue_depth, max_num_seqs=1, kv_cache_memory_bytes=2**30, **observing
        )
        for length in (100, 3700):
            with decoding(engine, 1, length):
                seconds = step_seconds(engine, 1, 256)
            row = {"length": length, "queue_depth": queue_depth, "observer": observer}
            record.add("latency", {**row, "seconds": seconds})
        engine.shutdown()
        del engine
        release()


def lines(figures: Mapping[str, Any], bandwidth: Mapping[str, Any]) -> list[str]:
    """Return a table of latencies against the floor."""
    copy, config = bandwidth.get("copy"), CONFIGS[figures["model"]]
    rows = []
    for row in figures.get("latency", []):
        floor = copy and step_bytes(config, 1, row["length"]) / copy
        ms = "–" if floor is None else f"{1e3 * floor:.3f}"
        of = percent(floor and floor / row["seconds"])
        case = [row["length"], row["queue_depth"], row["observer"] or "none"]
        rows.append([*case, f"{1e3 * row['seconds']:.3f}", ms, of])
    head = ["context", "queue depth", "observer", "ms a token", "floor", "of the floor"]
    return table(head, rows)


PART = Part(single, 45, "One sequence", lines)
