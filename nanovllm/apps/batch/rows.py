"""A row of a batch: its id, its seed, and how it is read and its output written.

Imports no engine: a driver writes the line of a row that no worker could compute.
"""

import codecs
import hashlib
import json
import math
from typing import Any, NamedTuple

from nanovllm.errors import InvalidRequestError
from nanovllm.options.validation import shown
from nanovllm.utils import strict_json
from nanovllm.utils.strict_json import StrictJSONError

ROWS = "rows"
OPENAI = "openai"
"""The forms of a batch: rows with a prompt, or OpenAI's batch file."""


class InputRow(NamedTuple):
    """A row as it was read."""

    number: int | None
    """Its place in the input, from 0; None in a dataset, whose rows have no order."""
    fields: dict[str, Any]
    problem: str | None = None
    """Why it cannot be read."""


class BadRowError(ValueError):
    """A text is not a row."""


def row_id(row: InputRow, column: str) -> str | int:
    """Return the row's id: the field `column`, or its index, or a digest of its content.

    Raises:
        InvalidRequestError: the field is neither a string nor an integer.
    """
    given = row.fields.get(column)
    if given is None:
        return (
            hashlib.sha256(dumps(row.fields)).hexdigest()[:32] if row.number is None else row.number
        )
    if not isinstance(given, str | int) or isinstance(given, bool):
        raise InvalidRequestError(f"{column} must be a string or an integer, got {shown(given)}")
    return given


def row_seed(seed: int, identity: str | int) -> int:
    """Return the seed of the row with this id, from 0 to 2**63 - 1, in a batch with this seed."""
    digest = hashlib.sha256(json.dumps([seed, identity]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def short_digest(*parts: str | int) -> str:
    """Return 32 hexadecimal digits that stand for the parts."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def dumps(value: Any) -> bytes:
    """Return a value as one line of JSON in UTF-8, without the end of the line.

    JSON has no infinite number and no NaN, which Parquet has: they become null.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, default=_plain, allow_nan=False)
    except ValueError:
        return dumps(_finite(value))
    try:
        return text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which only an escape can write
        return json.dumps(value, default=_plain).encode()


def parse_object(line: bytes) -> dict[str, Any]:
    """Return the object of a line of JSON, read as strictly as a server's body.

    Raises:
        BadRowError: the line is something else, nested too deeply, or has a key twice.
    """
    try:
        value = strict_json.read(line.removeprefix(codecs.BOM_UTF8).rstrip(b"\r\n"), "the line")
    except StrictJSONError as error:
        raise BadRowError(str(error)) from None
    if not isinstance(value, dict):
        raise BadRowError(
            f'a row must be an object such as {{"prompt": "..."}}, got {shown(value)}'
        )
    return value


def _finite(value: Any) -> Any:
    """Return a value with None for each number that JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plain(value: Any) -> str:
    """Return what JSON has no type for, such as a date of a Parquet file, as a text."""
    return value.hex() if isinstance(value, bytes) else str(value)


OUTPUT_COLUMNS = (
    "generated_text",
    "generated_tokens",
    "finish_reason",
    "num_input_tokens",
    "num_generated_tokens",
    "error",
)
"""The columns that rows with a prompt get; names are those of Ray Data's LLM module."""


def failed_columns(error: str) -> dict[str, Any]:
    """Return the columns of a row with an error; what is not a character in it is escaped."""
    text = error.encode(errors="backslashreplace").decode()
    return {**dict.fromkeys(OUTPUT_COLUMNS), "error": text}


def openai_line(
    row: InputRow, status: int, body: dict[str, Any], error: dict[str, Any] | None
) -> dict[str, Any]:
    """Return a line of OpenAI's output file."""
    custom_id = row.fields.get("custom_id")
    digest = short_digest(str(row.number), str(custom_id))
    return {
        "id": f"batch_req_{digest}",
        "custom_id": custom_id,
        "response": {"status_code": status, "request_id": f"req_{digest}", "body": body},
        "error": error,
    }


def openai_failure(row: InputRow, status: int, body: dict[str, Any]) -> dict[str, Any]:
    """Return the line of a row with an error: `body` is OpenAI's body of an error."""
    error = body["error"]
    code = error.get("code") or error["type"]
    return openai_line(row, status, body, {"code": code, "message": error["message"]})


def error_body(message: str, kind: str = "invalid_request_error") -> dict[str, Any]:
    """Return OpenAI's body of an error."""
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def failed_line(form: str, row: InputRow, error: str) -> bytes:
    """Return the output, as JSON, of a row whose error is not its own."""
    if form == OPENAI:
        return dumps(openai_failure(row, 500, error_body(error, "server_error")))
    return dumps(failed_columns(error))
