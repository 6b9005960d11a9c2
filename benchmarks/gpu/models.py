"""Part `models`: decode steps of each model at each batch size, with and without options."""

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
from benchmarks.gpu.part import Part, Record, describe, percent, table
from benchmarks.shapes import CONFIGS, SMALL

CASES: tuple[tuple[str, float, dict[str, Any]], ...] = (
    ("Qwen3-8B", 40, {}),
    ("Qwen3-32B", 75, {}),
    (SMALL, 25, {"enforce_eager": True}),
    ("Qwen3-8B", 40, {"quantization": "fp8"}),
    ("Qwen3-8B", 40, {"quantization": "int4"}),
)
"""A model, the seconds that it needs (a guess), and options of `Config`."""


def models(record: Record) -> None:
    """Measure each case. Record an error for a model that does not fit the GPU."""
    for name, seconds, options in CASES:
        if record.has_time(seconds, f"{name} {options}"):
            label = {"model": name, "options": options}
            try:
                measure_model(record, label, options)
            except Exception as error:
                record.add("rows", {**label, "error": describe(error)})
            release()


def measure_model(record: Record, label: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Add a row for each batch size."""
    length, steps = 256, 64
    engine = make_engine(
        record,
        label["model"],
        max_num_seqs=max(BATCHES),
        max_model_len=1024,
        kv_cache_memory_bytes=pool_bytes(label["model"], max(BATCHES), length),
        **options,
    )
    for batch in BATCHES:
        with decoding(engine, batch, length):
            seconds = step_seconds(engine, batch, steps)
        row = {"batch": batch, "length": length + WARM_STEPS + steps / 2, "seconds": seconds}
        record.add("rows", {**label, **row})
    engine.shutdown()


def lines(figures: Mapping[str, Any], bandwidth: Mapping[str, Any]) -> list[str]:
    """Return a table of steps against the floor."""
    copy = bandwidth.get("copy")
    rows = []
    for row in figures["rows"]:
        options = ", ".join(f"{key}={value}" for key, value in row["options"].items())
        cells = [row["model"], options]
        if "error" in row:
            rows.append([*cells, row["error"], "", "", "", ""])
            continue
        batch, seconds = row["batch"], row["seconds"]
        floor = copy and step_bytes(CONFIGS[row["model"]], batch, row["length"]) / copy
        if "quantization" in row["options"]:
            floor = None  # it reads fewer bytes
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
    head = ["model", "options", "rows x tokens", "ms a step", "floor", "tokens/s", "of the floor"]
    return table(head, rows)


PART = Part(models, 160, "Decode steps by model", lines)
