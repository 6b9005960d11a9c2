"""Files of rows, their seeds, and JSON in and out of a row."""

import json
import os
from pathlib import Path

import pytest

from nanovllm.apps.batch.rows import BadRowError, Source, dumps, parse_object, row_seed
from nanovllm.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("in.parquet", "a batch's file is .jsonl, got '.*in.parquet'; Ray Data reads"),
        ("none.jsonl", "cannot be read: No such file"),
        ("pipe.jsonl", "not a regular file, and it is read several times"),
    ],
)
def test_inputs_that_are_refused(tmp_path: Path, name: str, message: str) -> None:
    """Symptom of a pipe: it is read once, and the second reading waits for ever."""
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(ConfigError, match=message):
        Source(tmp_path / name)


def test_seeds_are_made_from_ids() -> None:
    """The numbers are fixed: other seeds would change the outputs of every job."""
    assert row_seed(0, "a") == 2671967653362453091
    assert len({row_seed(seed, given) for seed in (0, 1) for given in ("0", "1")}) == 4
    assert all(0 <= row_seed(0, f"{number}") < 2**63 for number in range(1000))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"a": ', "not JSON: Expecting value at line 1, column 7"),
        (b"[1]", "a row must be an object .* got \\[1\\]"),
        (b'{"a": NaN}', "it has no NaN"),
        (b'{"a": "\xff"}', "not UTF-8: invalid start byte at byte 7"),
        (b"[" * 100_000, "nested more than 100 deep"),
        (b'{"a": {"b": 1, "b": 1}}', "the line has the key 'b' twice"),
    ],
)
def test_a_line_that_is_no_row(line: bytes, message: str) -> None:
    with pytest.raises(BadRowError, match=message):
        parse_object(line)


@pytest.mark.parametrize("value", [{"a": "é\n\t😀"}, {"a": "half \ud800"}, {"a": [1, 2.5, None]}])
def test_a_row_is_one_line_of_utf8(value: object) -> None:
    line = dumps(value)
    assert b"\n" not in line
    assert json.loads(line.decode()) == value
    assert parse_object(b"\xef\xbb\xbf" + line) == value  # with the mark that some editors write
