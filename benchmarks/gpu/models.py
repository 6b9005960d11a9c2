"""Part `models`: decode steps of each model at each batch size.

The small model is measured without CUDA graphs too.
"""

from collections.abc import Mapping
from typing import Any

from benchmarks.gpu.engines import (
    BATCHES,
    WARM_STEPS,
    decoding,
    make_engine,
    pool_bytes,
    release,
    step_seconds,
)
from benchmarks.gpu.floors import step_bytes
from benchmarks.gpu.part import Part, Record, describe
from benchmarks.gpu.tables import percent, table
from benchmarks.shapes import CONFIGS, SMALL


def models(record: Record) -> None:
    """Measure each model. Record an error for a model that does not fit the GPU."""
    for name, eager in ((SMALL, False), (SMALL, True), ("Qwen3-8B", False), ("Qwen3-32B", False)):
        try:
            measure_model(record, name, eager)
        except Exception as error:
            record.add("rows", {"model": name, "eager": eager, "error": describe(error)})
        release()


def measure_model(record: Record, name: str, eager: bool) -> None:
    """Add a row for each batch size."""
    length, steps = 256, 64
    engine = make_engine(
        record,
        name,
        max_num_seqs=max(BATCHES),
        max_model_len=1024,
        kv_cache_memory_bytes=pool_bytes(name, max(BATCHES), length),
        enforce_eager=eager,
    )
    for batch in BATCHES:
        with decoding(engine, batch, length):
            seconds = step_seconds(engine, batch, steps)
        row = {"batch": batch, "length": length + WARM_STEPS + steps / 2, "seconds": seconds}
        record.add("rows", {"model": name, "eager": eager, **row})
    engine.shutdown()


def lines(figures: Mapping[str, Any], bandwidth: Mapping[str, Any]) -> list[str]:
    """Return a table of steps against the floor."""
    copy = bandwidth.get("copy")
    rows = []
    for row in figures["rows"]:
        cells = [row["model"], "no" if row["eager"] else "yes"]
        if "error" in row:
            rows.append([*cells, row["error"], "", "", "", ""])
            continue
        batch, seconds = row["batch"], row["seconds"]
        floor = copy and step_bytes(CONFIGS[row["model"]], batch, row["length"]) / copy
        rows.append(
            [
                *cells,
                f"{batch} x {row['length']:.0f}",
                f"{1e3 * seconds:.2f}",
                "–" if floor is None else f"{1e3 * floor:.2f}",
                f"{batch / seconds:,.0f}",
                percent(floor and floor / seconds),
            ]
        )
    head = ["model", "graphs", "rows x tokens", "ms a step", "floor", "tokens/s", "of the floor"]
    return table(head, rows)


PART = Part(models, 130, "Decode steps by model", lines)
