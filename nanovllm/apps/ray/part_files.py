"""A directory of parts: the finished rows of a dataset, in files that are written once.

`manifest.json` says whose rows they are, `lock` keeps a second process out, and a part is there
whole or not at all.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np

from nanovllm.apps.batch.job_files import job_directory, write_whole
from nanovllm.apps.batch.rows import dumps
from nanovllm.errors import ConfigError

FORMATS = ("parquet", "jsonl")
_ID_BYTES = 16
"""Of the digest of an id; two of a billion rows share one with a chance of 1 in 10**21."""
_MAX_ROWS = 4096
_MAX_SECONDS = 10.0
"""A crash loses the finished rows of so many seconds at most."""


class Parts(contextlib.ExitStack):
    """The parts of one job, locked while the block runs.

    Args:
        identity: what decides the outputs, as JSON.

    Raises:
        ConfigError: another process writes there, or what is there belongs to another job.
    """

    def __init__(
        self, directory: Path, identity: Mapping[str, Any], form: str, id_column: str
    ) -> None:
        super().__init__()
        self._directory = directory
        self._identity = {**identity, "parts": form}
        self._form = form
        self._id_column = id_column
        self._tables: list[Any] = []
        self._num_rows = 0
        self._since = 0.0

    def __enter__(self) -> "Parts":
        self.enter_context(job_directory(self._directory, self._identity))
        self.callback(self.flush)
        return self

    def files(self) -> list[Path]:
        """Return the finished parts in the order in which they were written."""
        return sorted(self._directory.glob(f"part-*.{self._form}"))

    def done_ids(self) -> "np.ndarray[Any, Any]":
        """Return the digests of the ids in the parts, sorted: 16 bytes a row."""
        found = [_digests(ids) for path in self.files() for ids in self._ids(path)]
        return np.sort(np.concatenate(found)) if found else _digests([])

    def _ids(self, path: Path) -> Iterator[list[Any]]:
        if self._form == "jsonl":
            with path.open("rb") as file:
                yield [json.loads(line)[self._id_column] for line in file]
            return
        import pyarrow.parquet as parquet

        yield parquet.read_table(path, columns=[self._id_column])[self._id_column].to_pylist()

    def add(self, table: Any) -> None:
        """Keep rows, a pyarrow table. They are written with others, after 10 s at most."""
        if not table.num_rows:
            return
        if missing := table[self._id_column].null_count:
            raise ConfigError(
                f"{missing} rows have no {self._id_column}: in a directory of parts each row needs "
                "an id, by which it is known to be done"
            )
        self._since = self._since if self._tables else time.monotonic()
        self._tables.append(table)
        self._num_rows += table.num_rows
        if self._num_rows >= _MAX_ROWS or time.monotonic() - self._since >= _MAX_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write the rows that are kept as a part."""
        if not self._tables:
            return
        import pyarrow as pa
        import pyarrow.parquet as parquet

        table = pa.concat_tables(self._tables, promote_options="permissive")
        if self._form == "jsonl":
            data = b"".join(dumps(row) + b"\n" for row in table.to_pylist())
        else:
            sink = pa.BufferOutputStream()
            parquet.write_table(table, sink)
            data = sink.getvalue().to_pybytes()
        number = max((int(path.stem[5:]) for path in self.files()), default=-1) + 1
        write_whole(self._directory / f"part-{number:06d}.{self._form}", data)
        self._tables = []
        self._num_rows = 0


def _digests(ids: Seq[Any]) -> "np.ndarray[Any, Any]":
    """Return a digest of each id, [number] of 16 bytes."""
    found = [hashlib.sha256(dumps(item)).digest()[:_ID_BYTES] for item in ids]
    return np.array(found, dtype=f"S{_ID_BYTES}")


def is_done(done: "np.ndarray[Any, Any]", ids: Seq[Any]) -> list[bool]:
    """Return for each id whether its digest is among the sorted ones of `done_ids`."""
    wanted = _digests(ids)
    places = np.minimum(np.searchsorted(done, wanted), len(done) - 1)
    return [bool(found) for found in done[places] == wanted]
