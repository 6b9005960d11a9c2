"""`nanovllm.apps.ray.generate`: a Dataset in and out, with parts that are computed once."""

import asyncio
import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from nanovllm import demo_model
from nanovllm.apps.batch.batch_options import BatchOptions, job_identity
from nanovllm.apps.batch.rows import OUTPUT_COLUMNS
from nanovllm.apps.ray.part_files import Parts
from nanovllm.errors import ConfigError
from tests.batch.helpers import ENGINE, SAMPLING, questions, read_rows, run, write_rows

ray = pytest.importorskip("ray")
pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

from nanovllm.apps.ray.datasets import RowsStage, _row_options, generate  # noqa: E402 (it needs Ray)

ROWS: list[dict[str, Any]] = [{**row, "id": i} for i, row in enumerate(questions(24))]
OPTIONS: dict[str, Any] = {
    "model": demo_model.MODEL,
    "sampling_params": SAMPLING,
    **ENGINE,
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What `nanovllm batch` writes for the same rows."""
    directory = tmp_path_factory.mktemp("batch")
    run(write_rows(directory / "in.jsonl", ROWS), directory / "out.jsonl")
    return [without_tag(row) for row in read_rows(directory / "out.jsonl")]


def without_tag(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("id", *OUTPUT_COLUMNS)}


@pytest.mark.long
def test_rows_in_parts_and_a_killed_actor(
    tmp_path: Path, ray_cluster: Any, expected: list[dict[str, Any]]
) -> None:
    """The outputs are those of the command; parts stay as they are; a bad row has its error."""
    rows = [*ROWS, {"id": 99, "prompt": "too long " * 200, "tag": 0}]
    changes = {"workers": 2, "block_rows": 8, "output_path": str(tmp_path / "out")}
    identity = job_identity(_row_options(demo_model.MODEL, SAMPLING, BatchOptions(), ENGINE))
    done = [{**ROWS[i], **expected[i], "generated_text": f"done {i}"} for i in range(10)]
    with Parts(tmp_path / "out", identity, "parquet", "id") as parts:
        parts.add(pa.Table.from_pylist(done))
    (tmp_path / "out" / "part-000009.parquet.new").write_bytes(b"torn")
    killer = threading.Thread(target=kill_first, daemon=True)
    killer.start()
    outputs = generate(ray.data.from_items(rows), **OPTIONS, **changes)
    assert not killer.is_alive()
    assert outputs.schema().names == [*done[0]]
    files = sorted((tmp_path / "out").glob("part-*.parquet"))  # to read by Ray takes 10 s
    found = [row for file in files for row in parquet.read_table(file).to_pylist()]
    *good, bad = sorted(map(without_tag, found), key=lambda row: row["id"])
    assert good == [*map(without_tag, done), *expected[10:]]
    assert "max_model_len" in bad["error"]
    assert len(files) > 1


def kill_first() -> None:
    """Kill the first actor with an engine, as soon as it works."""
    while True:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "RowsStage" in " ".join(process.cmdline()):
                    process.kill()
                    return
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": 0}, "workers must be an integer >= 1, got 0"),
        ({"workers": (3, 2)}, "workers must be an integer >= 3, got 2"),
        ({"output_format": "csv"}, "output_format must be"),
        ({"max_num_seqs": 0}, "max_num_seqs must be"),
        ({"sampling_params": 3}, "must be SamplingParams or a dictionary, got 3"),
        ({"sampling_params": {"logprobs": 1}}, "logprobs=1 is not for a batch"),
        ({"id_column": "key"}, "has no column 'key', only prompt, tag, id"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, ray_cluster: Any, changes: dict[str, Any], message: str
) -> None:
    options = {**OPTIONS, "output_path": str(tmp_path / "out"), **changes}
    with pytest.raises(ConfigError, match=message):
        generate(ray.data.from_items(ROWS[:2]), **options)


def test_what_cannot_be_written_is_refused_before_it_is_computed() -> None:
    """Symptom: parts of objects without fields are computed again and again."""
    options = _row_options(demo_model.MODEL, {"max_tokens": 1}, BatchOptions(), ENGINE)
    table = pa.table({"prompt": ["A"], "x": pa.array([{}], pa.struct([]))})
    stage = RowsStage(options, "parquet")
    try:
        with pytest.raises(
            ConfigError, match="no child field to Parquet.*use output_format='jsonl'"
        ):
            asyncio.run(stage(table))
        stage._output_format = "jsonl"
        assert asyncio.run(stage(table))["error"].to_pylist() == [None]
    finally:
        stage._engine.close()
