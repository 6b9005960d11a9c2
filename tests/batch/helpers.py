"""Batches of the glossary's questions, and what their tests share."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nanovllm import demo_model
from nanovllm.apps.batch.batch_options import BatchOptions, RowOptions
from nanovllm.apps.batch.job import Finished, run_job
from nanovllm.apps.batch.row_engine import RowEngine
from nanovllm.apps.batch.rows import Source
from tests.glossary import QUESTIONS

ENGINE: dict[str, Any] = {
    "max_model_len": 256,
    "num_kvcache_blocks": 512,
    "max_num_seqs": 8,
    "enforce_eager": True,
}
FLAGS = [
    *("--model", demo_model.MODEL, "--max-model-len", "256", "--num-kvcache-blocks", "512"),
    *("--max-num-seqs", "8", "--enforce-eager"),
]


def text_row(custom_id: Any, prompt: Any, **body: Any) -> dict[str, Any]:
    """Return a row that continues a prompt."""
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 2.0, **body}
    return {"custom_id": custom_id, "url": "/v1/completions", "body": body}


def questions(number: int) -> list[dict[str, Any]]:
    """Return rows that ask the glossary's questions over and over."""
    return [text_row(f"q{i}", QUESTIONS[i % len(QUESTIONS)]) for i in range(number)]


def write_rows(path: Path, rows: Iterable[dict[str, Any] | str]) -> Path:
    """Write JSON lines; a string is a line as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def text_of(row: dict[str, Any]) -> Any:
    """Return the first text of an answer to a `text_row`."""
    return row["response"]["body"]["choices"][0]["text"]


def row_options(engine_options: dict[str, Any] = ENGINE, **batch: Any) -> RowOptions:
    """Return the options of a batch of the demo model."""
    return RowOptions(demo_model.MODEL, engine_options, BatchOptions(**batch))


def run(source: Path, output: Path, **changes: Any) -> Finished:
    """Run a job in this process."""
    options = row_options(**changes)
    return run_job(Source(source), output, options, RowEngine)
