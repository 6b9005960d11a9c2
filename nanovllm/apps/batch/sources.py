"""The rows of an input file, one after another: JSON lines, or Parquet.

Holds a part of the file in memory.
"""

import hashlib
import importlib.util
import stat
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanovllm.apps.batch.rows import OPENAI, ROWS, BadRowError, InputRow, parse_object
from nanovllm.errors import ConfigError
from nanovllm.options.validation import shown

_ROWS_AT_ONCE = 1024


def check_unchanged(source: "Source") -> None:
    """Raise ConfigError if the file was changed since it was opened."""
    if _stamp(source.path) != source.stamp:
        raise ConfigError(
            f"the input {source.path} has changed while it was read: run the batch again with "
            "another output"
        )


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def open_source(path: Path, form: str = ROWS) -> "Source":
    """Return the rows of a file, whose name ends with what it is.

    Args:
        form: what its rows are, if it has none that can be read and would show it.

    Raises:
        ConfigError: it is missing, cannot be read, or is not such a file.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(
                f"the input {shown(str(path))} is not a regular file, and it is read several "
                "times: write its rows to a file"
            )
        return ParquetRows(path) if is_parquet(path) else JSONLines(path, form)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"the input {shown(str(path))} cannot be read: {reason}") from None


def is_parquet(path: Path) -> bool:
    """Whether a file is Parquet by its name; other files hold JSON lines.

    Raises:
        ConfigError: the name says neither; or it is Parquet, and pyarrow is not installed.
    """
    ending = path.suffix.lower()
    if ending in (".jsonl", ".ndjson", ".json"):
        return False
    if ending not in (".parquet", ".pq"):
        raise ConfigError(f"a batch's file is .jsonl or .parquet, got {shown(str(path))}")
    if importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(
            f"{path} is Parquet, and pyarrow is not installed: "
            "pip install -e '.[ray]' -c constraints.txt"
        )
    return True


class JSONLines:
    """A file with a row in each line. Empty lines do not count."""

    def __init__(self, path: Path, form: str) -> None:
        self.path = path
        self.stamp = _stamp(path)
        self.num_rows, self.digest = _count_lines(path)
        self.form = self._find_form(form)
        self._repeated = self._find_repeated() if self.form == OPENAI else set()

    def rows(self) -> Iterator[InputRow]:
        """Yield the rows; one that cannot be read, or has the custom_id of another, says why."""
        numbers: dict[str, int | None] = {}  # of repeated names: the first row that has it
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

    def _find_form(self, otherwise: str) -> str:
        """Return the form of the first row that can be read; without one `otherwise`."""
        for row in self._lines():
            if row.problem is None:
                is_openai = "body" in row.fields and {"custom_id", "url"} & row.fields.keys()
                return OPENAI if is_openai else ROWS
        return otherwise

    def _find_repeated(self) -> set[int]:
        """Return the hashes that several custom_ids have. Memory: eight bytes a row."""
        import numpy as np  # only here: the command line starts without it

        names = (row.fields.get("custom_id") for row in self._lines())
        hashes = array("q", (hash(name) for name in names if isinstance(name, str)))
        found, counts = np.unique(np.asarray(hashes, np.int64), return_counts=True)
        return set(found[counts > 1].tolist())


def _count_lines(path: Path) -> tuple[int, str]:
    """Return how many lines are not empty, and the digest of the file."""
    digest = hashlib.sha256()
    num_lines = 0
    with path.open("rb") as file:
        for line in file:
            digest.update(line)
            num_lines += bool(line.strip())
    return num_lines, digest.hexdigest()


class ParquetRows:
    """A Parquet file."""

    form = ROWS

    def __init__(self, path: Path) -> None:
        import pyarrow
        import pyarrow.parquet as parquet

        self.path = path
        self.stamp = _stamp(path)
        with path.open("rb") as file:
            self.digest = hashlib.file_digest(file, "sha256").hexdigest()
        try:
            with parquet.ParquetFile(path) as opened:
                self.num_rows = opened.metadata.num_rows
                self.schema = opened.schema_arrow
        except pyarrow.ArrowInvalid as error:
            raise ConfigError(f"the input {path} is not a Parquet file: {error}") from None
        for name, count in Counter(self.schema.names).items():
            if count > 1:
                raise ConfigError(f"the input {path} has {count} columns {shown(name)}: rename one")
        if {"body", "custom_id"} <= set(self.schema.names):
            raise ConfigError(f"OpenAI's batch format is JSON lines, and {path} is Parquet")

    def batches(self) -> Iterator[Any]:
        """Yield the rows as pyarrow's record batches."""
        import pyarrow.parquet as parquet

        with parquet.ParquetFile(self.path) as opened:
            yield from opened.iter_batches(_ROWS_AT_ONCE)

    def rows(self) -> Iterator[InputRow]:
        """Yield the rows.

        Raises:
            ConfigError: Python has no such values: a structure with two fields of one name, a
                string that is not UTF-8.
        """
        number = 0
        for batch in self.batches():
            try:
                rows = batch.to_pylist()
            except (ValueError, NotImplementedError) as error:
                raise ConfigError(
                    f"the rows of {self.path} from {number} on cannot be read: {error}"
                ) from None
            for fields in rows:
                yield InputRow(number, fields)
                number += 1


Source = JSONLines | ParquetRows
"""A file of rows. Its `form` is `ROWS` or `OPENAI`, its `digest` the file's sha256, its `stamp` the
size in bytes and the time of the last change, when it was opened."""
