"""Ids, seeds, and JSON in and out of a row."""

import json

import pytest

from nanovllm.apps.batch.rows import BadRowError, InputRow, dumps, parse_object, row_id, row_seed
from nanovllm.errors import InvalidRequestError


def test_an_id_is_the_column_or_the_number_or_a_digest() -> None:
    assert row_id(InputRow(3, {"id": "a"}), "id") == "a"
    assert row_id(InputRow(3, {"id": None}), "id") == 3
    assert row_id(InputRow(3, {"key": 7}), "key") == 7
    first, second = InputRow(None, {"prompt": "x"}), InputRow(None, {"prompt": "y"})
    assert row_id(first, "id") == row_id(first, "id") != row_id(second, "id")


@pytest.mark.parametrize("given", [1.5, True, [1], {"a": 1}])
def test_an_id_is_a_string_or_an_integer(given: object) -> None:
    with pytest.raises(InvalidRequestError, match="id must be a string or an integer, got"):
        row_id(InputRow(0, {"id": given}), "id")


def test_seeds_are_made_from_ids() -> None:
    """The numbers are fixed: other seeds would change the outputs of every job."""
    assert row_seed(0, 0) == 6168997292806018030
    assert len({row_seed(seed, given) for seed in (0, 1) for given in (0, 1, "0", "1")}) == 8
    assert all(0 <= row_seed(0, number) < 2**63 for number in range(1000))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"a": ', "not JSON: Expecting value at line 1, column 7"),
        (b'{"a": 1\n', "not JSON: Expecting ',' delimiter at line 1, column 8"),
        (b"[1]", "a row must be an object .* got \\[1\\]"),
        (b'{"a": NaN}', "it has no NaN"),
        (b'{"a": "\xff"}', "not UTF-8: invalid start byte at byte 7"),
        (b"[" * 100_000, "nested more than 100 deep"),
        (b'{"a": %b1e999%b}' % (b"[" * 600, b"]" * 600), "the number '1e999' is too large"),
        (b'{"a": %b1%b}' % (b"[" * 100, b"]" * 100), "nested more than 100 deep"),
        (b'{"a": {"b": 1, "b": 1}}', "the line has the key 'b' twice"),
        (b'{"a": ' + b"9" * 5000 + b"}", "a number of thousands of digits"),
    ],
)
def test_a_line_that_is_no_row(line: bytes, message: str) -> None:
    with pytest.raises(BadRowError, match=message):
        parse_object(line)


def test_json_has_no_infinity_and_no_nan() -> None:
    """A Parquet file has them."""
    fields = {"a": [float("inf"), 1.5], "b": {"c": float("nan")}}
    assert dumps(fields) == b'{"a": [null, 1.5], "b": {"c": null}}'


def test_what_can_be_read_can_be_written() -> None:
    """Symptom: a row 600 deep with 1e999 is computed, and no output can be written."""
    line = b'{"a": %b1.5%b}' % (b"[" * 99, b"]" * 99)
    assert dumps(parse_object(line)) == line


def test_the_mark_that_some_editors_write_first() -> None:
    assert parse_object(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}


@pytest.mark.parametrize("value", [{"a": "é\n\t😀"}, {"a": "half \ud800"}, {"a": [1, 2.5, None]}])
def test_a_row_is_one_line_of_utf8(value: object) -> None:
    line = dumps(value)
    assert b"\n" not in line
    assert json.loads(line.decode()) == value
