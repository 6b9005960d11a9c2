"""Rows of OpenAI's batch files: how they are read, their seeds, and the lines of their outputs.

Imports no engine: a driver writes the line of a row that no worker could compute.
"""

import codecs
import hashlib
import json
import stat
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm.errors import ConfigError
from nanovllm.options.validation import shown
from nanovllm.utils import strict_json
from nanovllm.utils.strict_json import StrictJSONError

ROW = '{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "..."}}'
"""A row, for messages."""
DIED = "one engine after another died while it computed this row"


class InputRow(NamedTuple):
    """A row as it was read."""

    number: int
    """Its place in the input, from 0."""
    fields: dict[str, Any]
    problem: str | None = None
    """Why it cannot be read."""


class BadRowError(ValueError):
    """A text is not a row."""


class Source:
    """The rows of a file, one on each line. Empty lines do not count.

    Attributes:
        digest: the file's sha256.

    Raises:
        ConfigError: the file is missing, cannot be read, or is not JSON lines by its name.
    """

    def __init__(self, path: Path) -> None:
        check_name(path)
        self.path = path
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise ConfigError(
                    f"the input {shown(str(path))} is not a regular file, and it is read several "
                    "times: write its rows to a file"
                )
            self._stamp = _stamp(path)
            self.num_rows, self.digest = _count_lines(path)
            self._repeated = self._find_repeated()
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"the input {shown(str(path))} cannot be read: {reason}") from None

    def check_unchanged(self) -> None:
        """Raise ConfigError if the file has changed since it was opened."""
        if _stamp(self.path) != self._stamp:
            raise ConfigError(
                f"the input {self.path} has changed while it was read: run the batch again with "
                "another output"
            )

    def rows(self) -> Iterator[InputRow]:
        """Yield the rows; one that cannot be read, or has the custom_id of another, says why."""
        numbers: dict[str, int] = {}  # of repeated names: the first row that has it
        for row in self._lines():
            name = row.fields.get("custom_id")
            if self._repeated and isinstance(name, str) and hash(name) in self._repeated:
                first = numbers.setdefault(name, row.number)
                if first != row.number:
                    problem = (
                        f"row {first} has the custom_id {shown(name)}, too: each needs its own"
                    )
                    row = row._replace(problem=problem)
            yield row

    def _lines(self) -> Iterator[InputRow]:
        with self.path.open("rb") as file:
            number = 0
            for line in file:
                if not line.strip():
                    continue
                try:
                    row = InputRow(number, parse_object(line))
                except BadRowError as error:
                    row = InputRow(number, {}, str(error))
                yield row
                number += 1

    def _find_repeated(self) -> set[int]:
        """Return the hashes that several custom_ids have. Memory: eight bytes a row."""
        import numpy as np  # only here: the command line starts without it

        names = (row.fields.get("custom_id") for row in self._lines())
        hashes = array("q", (hash(name) for name in names if isinstance(name, str)))
        found, counts = np.unique(np.asarray(hashes, np.int64), return_counts=True)
        return set(found[counts > 1].tolist())


def check_name(path: Path) -> None:
    """Raise ConfigError unless a file is JSON lines by its name."""
    if path.suffix.lower() not in (".jsonl", ".ndjson", ".json"):
        raise ConfigError(
            f"a batch's file is .jsonl, got {shown(str(path))}; Ray Data reads other files: "
            "docs/batch.md"
        )


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _count_lines(path: Path) -> tuple[int, str]:
    """Return how many lines are not empty, and the digest of the file."""
    digest = hashlib.sha256()
    num_lines = 0
    with path.open("rb") as file:
        for line in file:
            digest.update(line)
            num_lines += bool(line.strip())
    return num_lines, digest.hexdigest()


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
        raise BadRowError(f"a row must be an object such as {ROW}, got {shown(value)}")
    return value


def row_seed(seed: int, identity: str) -> int:
    """Return the seed of the row with this id, from 0 to 2**63 - 1, in a batch with this seed."""
    digest = hashlib.sha256(json.dumps([seed, identity]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def short_digest(*parts: str | int) -> str:
    """Return 32 hexadecimal digits that stand for the parts."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def dumps(value: Any) -> bytes:
    """Return a value as one line of JSON in UTF-8, without the end of the line."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:  # half a surrogate pair, which only an escape can write
        return json.dumps(value, allow_nan=False).encode()


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


def failed_line(row: InputRow, error: str) -> bytes:
    """Return the output, as JSON, of a row whose error is not its own."""
    return dumps(openai_failure(row, 500, error_body(error, "server_error")))
