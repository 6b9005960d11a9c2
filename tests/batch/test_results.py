"""Inputs and outputs as files: JSON lines and Parquet."""

import datetime
import os
from pathlib import Path
from typing import Any

import pytest

from nanovllm.apps.batch.rows import OUTPUT_COLUMNS
from nanovllm.apps.batch.sources import open_source
from nanovllm.errors import ConfigError
from tests.batch.helpers import questions, read_rows, row_options, run, write_rows

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

ROWS: list[dict[str, Any]] = [
    {"prompt": "A cache", "day": datetime.date(2026, 1, i + 1), "sampling_params": None}
    for i in range(3)
]
ROWS[1]["sampling_params"] = {"max_tokens": 3, "seed": None}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "in.parquet"
    parquet.write_table(pa.Table.from_pylist(ROWS), path)
    return path


def test_parquet_keeps_its_columns_and_types(table: Path) -> None:
    output = table.with_name("out.parquet")
    assert run(table, output).num_failed == 0
    found = parquet.read_table(output)
    assert found.column_names == ["id", *ROWS[0], *OUTPUT_COLUMNS]
    assert found.schema.field("day").type == pa.date32()
    rows = found.to_pylist()
    assert [row["day"] for row in rows] == [row["day"] for row in ROWS]
    assert [row["id"] for row in rows] == [0, 1, 2]
    assert [row["num_generated_tokens"] for row in rows] == [6, 3, 6]


def test_parquet_and_json_have_the_same_outputs(table: Path) -> None:
    run(table, table.with_name("a.parquet"))
    lines = [{"prompt": "A cache", "sampling_params": row["sampling_params"]} for row in ROWS]
    run(write_rows(table.with_name("in.jsonl"), lines), table.with_name("b.jsonl"))
    a = parquet.read_table(table.with_name("a.parquet")).to_pylist()
    b = read_rows(table.with_name("b.jsonl"))
    for name in ("id", *OUTPUT_COLUMNS):
        assert [row[name] for row in a] == [row[name] for row in b]


def test_several_answers_are_lists(table: Path) -> None:
    run(table, table.with_name("out.parquet"), sampling={"max_tokens": 2, "n": 2})
    found = parquet.read_table(table.with_name("out.parquet"))
    assert [len(text) for text in found["generated_text"].to_pylist()] == [2, 2, 2]


TWO_FIELDS = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
NO_UTF8 = pa.array([b"\xff"], pa.binary()).view(pa.string())


@pytest.mark.parametrize("column", [TWO_FIELDS, NO_UTF8])
def test_values_that_cannot_be_read_are_refused_before_rows_are_computed(
    tmp_path: Path, column: Any
) -> None:
    parquet.write_table(pa.table({"prompt": ["A"], "x": column}), tmp_path / "in.parquet")
    with pytest.raises(ConfigError, match="the rows of .*in.parquet from 0 on cannot be read: "):
        run(tmp_path / "in.parquet", tmp_path / "out.parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["in.parquet"]


def test_two_columns_of_one_name(tmp_path: Path) -> None:
    """Symptom: one is lost without a word."""
    columns = [pa.array(["a"]), pa.array(["b"])]
    parquet.write_table(pa.table(columns, names=["prompt"] * 2), tmp_path / "in.parquet")
    with pytest.raises(ConfigError, match="has 2 columns 'prompt': rename one"):
        open_source(tmp_path / "in.parquet")
    with pytest.raises(ConfigError, match="id_column='error' is a column of the output"):
        row_options(id_column="error")


def test_a_pipe_is_no_input(tmp_path: Path) -> None:
    """Symptom: it is read once, and the second reading waits for ever."""
    os.mkfifo(tmp_path / "in.jsonl")
    with pytest.raises(ConfigError, match="not a regular file, and it is read several times"):
        open_source(tmp_path / "in.jsonl")


def test_columns_of_an_earlier_output_are_replaced(tmp_path: Path) -> None:
    run(write_rows(tmp_path / "in.jsonl", ["{bad", *questions(2)]), tmp_path / "a.jsonl")
    run(tmp_path / "a.jsonl", tmp_path / "b.jsonl", prompt_column="generated_text")
    first, *others = read_rows(tmp_path / "b.jsonl")
    assert "neither" in first["error"]
    assert [row["error"] for row in others] == [None, None]
    assert [row["tag"] for row in others] == [0, 1]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("in.csv", b"", "a batch's file is .jsonl or .parquet, got '.*in.csv'"),
        ("in.parquet", b"no", "is not a Parquet file"),
        ("none.jsonl", None, "cannot be read: No such file"),
    ],
)
def test_inputs_that_are_refused(
    tmp_path: Path, name: str, data: bytes | None, message: str
) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        open_source(tmp_path / name)


def test_outputs_that_are_refused(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", questions(1))
    with pytest.raises(ConfigError, match="is the input"):
        run(source, source)
    with pytest.raises(ConfigError, match=r"is .jsonl or .parquet"):
        run(source, tmp_path / "out")
    openai = write_rows(tmp_path / "openai.jsonl", [{"custom_id": "a", "body": {}}])
    with pytest.raises(ConfigError, match="must end in .jsonl, as the input"):
        run(openai, tmp_path / "out.parquet")
