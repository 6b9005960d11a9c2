"""Batches of the glossary's questions, and what their tests share."""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nanovllm import demo_model
from nanovllm.apps.batch.batch_options import BatchOptions, RowOptions
from nanovllm.apps.batch.job import Finished, run_job
from nanovllm.apps.batch.row_engine import RowEngine
from nanovllm.apps.batch.sources import open_source
from tests.glossary import QUESTIONS

ENGINE: dict[str, Any] = {
    "max_model_len": 256,
    "num_kvcache_blocks": 512,
    "max_num_seqs": 8,
    "enforce_eager": True,
}
SAMPLING: dict[str, Any] = {"max_tokens": 6, "temperature": 2.0}
FLAGS = [
    *("--model", demo_model.MODEL, "--max-model-len", "256", "--num-kvcache-blocks", "512"),
    *("--max-num-seqs", "8", "--enforce-eager", "--temperature", "2"),
]


def questions(number: int) -> list[dict[str, Any]]:
    """Return rows that ask the glossary's questions over and over."""
    return [{"prompt": QUESTIONS[i % len(QUESTIONS)], "tag": i} for i in range(number)]


def write_rows(path: Path, rows: Iterable[dict[str, Any] | str]) -> Path:
    """Write JSON lines; a string is a line as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def row_options(form: str = "rows", **changes: Any) -> RowOptions:
    """Return the options of a batch of the demo model."""
    of_batch = {field.name for field in dataclasses.fields(BatchOptions)} & changes.keys()
    given: dict[str, Any] = {
        "engine_options": ENGINE,
        "sampling": SAMPLING if form == "rows" else {},
        "form": form,
        "batch": BatchOptions(**{name: changes.pop(name) for name in of_batch}),
        **changes,
    }
    return RowOptions(demo_model.MODEL, **given)


def run(source: Path, output: Path, **changes: Any) -> Finished:
    """Run a job in this process."""
    opened = open_source(source)
    options = row_options(opened.form, **changes)
    return run_job(opened, output, options, lambda: RowEngine(options))
