"""The output of a job: what each row was, and what became of it, in the order of the input.

Holds a part of the rows in memory.
"""

import io
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from nanovllm.apps.batch.batch_options import RowOptions
from nanovllm.apps.batch.rows import OPENAI, OUTPUT_COLUMNS, InputRow, dumps, failed_columns
from nanovllm.apps.batch.sources import ParquetRows, Source, is_parquet
from nanovllm.errors import ConfigError

_ROWS_AT_ONCE = 1024

Outputs = Callable[[], Iterable[bytes]]
"""Returns the outputs of all rows, in the order of the input."""


def check_output(source: Source, output: Path, options: RowOptions) -> None:
    """Raise ConfigError if a file cannot hold the output: before any row is computed.

    JSON that was read can be written; Parquet is read, and written to a file that keeps nothing.
    """
    if is_parquet(output) and source.form == OPENAI:
        raise ConfigError(f"OpenAI's batch format is JSON lines: {output} must end in .jsonl")
    if output.exists() and output.samefile(source.path):
        raise ConfigError(f"the output {output} is the input: name another")
    if is_parquet(output) or isinstance(source, ParquetRows):
        _try_to_write(source, output, options)


def _try_to_write(source: Source, output: Path, options: RowOptions) -> None:
    import pyarrow as pa

    try:
        if isinstance(source, ParquetRows):
            for _ in source.rows():
                pass  # it says what cannot be read
            no_answers = itertools.repeat(dumps(failed_columns("")), source.num_rows)
            write_output(_Nowhere(), output, source, options, lambda: no_answers)
        else:
            _found_schema(source, options, [])
    except (pa.ArrowException, OverflowError, UnicodeEncodeError) as error:
        raise ConfigError(
            "the rows do not fit the columns of a Parquet file: "
            f"{str(error).rstrip('.')}; name the output .jsonl"
        ) from None


def write_output(
    file: BinaryIO, path: Path, source: Source, options: RowOptions, outputs: Outputs
) -> None:
    """Write the output of all rows.

    Args:
        path: by whose name the file is Parquet or JSON lines.

    Raises:
        ConfigError: values of a Parquet input cannot be read.
        pyarrow.ArrowException: not after `check_output`.
    """
    if is_parquet(path):
        _write_parquet(file, source, options, outputs)
        return
    lines = outputs() if source.form == OPENAI else map(dumps, _merged(source, options, outputs))
    for line in lines:
        file.write(line + b"\n")


def merged(row: InputRow, id_column: str, columns: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the columns of its output, which take the place of older ones."""
    given = row.fields.get(id_column)
    fields = {name: value for name, value in row.fields.items() if name not in OUTPUT_COLUMNS}
    fields.pop(id_column, None)
    return {id_column: row.number if given is None else given, **fields, **columns}


def _merged(source: Source, options: RowOptions, outputs: Outputs) -> Iterator[dict[str, Any]]:
    for row, output in zip(source.rows(), outputs(), strict=True):
        yield merged(row, options.batch.id_column, json.loads(output))


def output_fields(num_answers: int) -> list[Any]:
    """Return pyarrow's fields of the columns of the output: lists with more than one answer."""
    import pyarrow as pa

    text = pa.string()
    tokens = pa.list_(pa.int64())
    if num_answers > 1:
        text = pa.list_(text)
        tokens = pa.list_(tokens)
    types = (text, tokens, text, pa.int64(), pa.int64(), pa.string())
    return [pa.field(name, kind) for name, kind in zip(OUTPUT_COLUMNS, types, strict=True)]


def with_outputs(table: Any, outputs: Iterable[bytes], fields: list[Any]) -> Any:
    """Return a pyarrow table with the columns of outputs, which take the place of older ones."""
    import pyarrow as pa

    found = [json.loads(output) for output in outputs]
    table = table.select([name for name in table.column_names if name not in OUTPUT_COLUMNS])
    for field in fields:
        values = pa.array([columns[field.name] for columns in found], field.type)
        table = table.append_column(field, values)
    return table


def _write_parquet(file: BinaryIO, source: Source, options: RowOptions, outputs: Outputs) -> None:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    own = output_fields(options.sampling.get("n", 1))
    if isinstance(source, ParquetRows):
        given = [field for field in source.schema if field.name not in OUTPUT_COLUMNS]
        tables = _joined(source, options.batch.id_column, own, outputs)
        if options.batch.id_column not in source.schema.names:
            given.insert(0, pa.field(options.batch.id_column, pa.int64()))
        schema = pa.schema([*given, *own], metadata=source.schema.metadata)
    else:
        schema = _found_schema(source, options, own)
        rows = _batched(_merged(source, options, outputs))
        tables = (pa.Table.from_pylist(some, schema=schema) for some in rows)
    with parquet.ParquetWriter(file, schema) as writer:
        for table in tables:
            writer.write_table(table)


def _joined(source: ParquetRows, id_column: str, own: list[Any], outputs: Outputs) -> Iterator[Any]:
    """Yield the input's tables with the columns of the output; its own columns keep their types."""
    import pyarrow as pa

    lines = iter(outputs())
    start = 0
    for batch in source.batches():
        table = pa.Table.from_batches([batch])
        if id_column not in table.column_names:
            numbers = pa.array(range(start, start + batch.num_rows), pa.int64())
            table = table.add_column(0, id_column, numbers)
        start += batch.num_rows
        yield with_outputs(table, itertools.islice(lines, batch.num_rows), own)


def _found_schema(source: Source, options: RowOptions, own: list[Any]) -> Any:
    """Return the schema that all rows of JSON fit, after reading and writing them once.

    Raises:
        pyarrow.ArrowException, OverflowError, UnicodeEncodeError: none does: a column has values of
            several types, or an object without fields, or is nested too deeply.
    """
    import pyarrow as pa
    import pyarrow.parquet as parquet

    schema = pa.schema([])
    for rows in _batched(source.rows()):
        found = _all_columns([merged(row, options.batch.id_column, {}) for row in rows])
        schema = pa.unify_schemas([schema, found], promote_options="permissive")
    with parquet.ParquetWriter(_Nowhere(), schema) as writer:
        for rows in _batched(source.rows()):
            given = [merged(row, options.batch.id_column, {}) for row in rows]
            writer.write_table(pa.Table.from_pylist(given, schema=schema))
    check_schema(schema)
    return pa.schema([*schema, *own])


def check_schema(schema: Any) -> None:
    """Raise pyarrow.ArrowException if a Parquet file cannot have a schema.

    It has an object without fields, or is nested so deeply that readers refuse it.
    """
    import pyarrow as pa
    import pyarrow.parquet as parquet

    file = io.BytesIO()
    parquet.write_table(schema.empty_table(), file)
    try:
        parquet.read_schema(file)
    except OSError as error:
        raise pa.ArrowInvalid(str(error)) from None


def _all_columns(rows: list[dict[str, Any]]) -> Any:
    """Return the schema of rows; pyarrow itself looks at the columns of the first one only."""
    import pyarrow as pa

    names = dict.fromkeys(name for row in rows for name in row)
    return pa.schema([(name, pa.array([row.get(name) for row in rows]).type) for name in names])


class _Nowhere(io.BytesIO):
    """A file that knows how much was written to it, and keeps nothing else."""

    _num_bytes = 0

    def tell(self) -> int:
        return self._num_bytes

    def write(self, data: Any) -> int:
        self._num_bytes += len(data)
        return len(data)


def _batched(values: Iterable[Any]) -> Iterator[list[Any]]:
    iterator = iter(values)
    while some := list(itertools.islice(iterator, _ROWS_AT_ONCE)):
        yield some
