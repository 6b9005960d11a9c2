"""The output of a job: what each row was, and what became of it, in the order of the input.

Holds a part of the rows in memory.
"""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from nanovllm.apps.batch.batch_options import RowOptions
from nanovllm.apps.batch.rows import OPENAI, OUTPUT_COLUMNS, dumps
from nanovllm.apps.batch.sources import ParquetRows, Source, is_parquet
from nanovllm.errors import ConfigError

Outputs = Callable[[], Iterable[bytes]]
"""Returns the outputs of all rows, in the order of the input."""


def check_output(source: Source, output: Path) -> None:
    """Raise ConfigError if a file cannot hold the output: before any row is computed."""
    if is_parquet(output) != isinstance(source, ParquetRows):
        ending = ".parquet" if isinstance(source, ParquetRows) else ".jsonl"
        raise ConfigError(f"the output {output} must end in {ending}, as the input's rows are")
    if output.exists() and output.samefile(source.path):
        raise ConfigError(f"the output {output} is the input: name another")
    if isinstance(source, ParquetRows):
        for _ in source.rows():
            pass  # it says what cannot be read


def write_output(file: BinaryIO, source: Source, options: RowOptions, outputs: Outputs) -> None:
    """Write the output of all rows."""
    if isinstance(source, ParquetRows):
        _write_parquet(file, source, options, outputs)
        return
    lines = outputs() if source.form == OPENAI else map(dumps, _merged(source, options, outputs))
    for line in lines:
        file.write(line + b"\n")


def _merged(source: Source, options: RowOptions, outputs: Outputs) -> Iterator[dict[str, Any]]:
    """Yield rows with the columns of their outputs, which take the place of older ones."""
    id_column = options.batch.id_column
    for row, output in zip(source.rows(), outputs(), strict=True):
        given = row.fields.get(id_column)
        left_out = (*OUTPUT_COLUMNS, id_column)
        fields = {name: value for name, value in row.fields.items() if name not in left_out}
        number = row.number if given is None else given
        yield {id_column: number, **fields, **json.loads(output)}


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


def _write_parquet(
    file: BinaryIO, source: ParquetRows, options: RowOptions, outputs: Outputs
) -> None:
    """Write the input's tables with the columns of the output; its own columns keep their types."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    own = output_fields(options.sampling.get("n", 1))
    id_column = options.batch.id_column
    given = [field for field in source.schema if field.name not in OUTPUT_COLUMNS]
    if id_column not in source.schema.names:
        given.insert(0, pa.field(id_column, pa.int64()))
    schema = pa.schema([*given, *own], metadata=source.schema.metadata)
    lines = iter(outputs())
    start = 0
    with parquet.ParquetWriter(file, schema) as writer:
        for batch in source.batches():
            table = pa.Table.from_batches([batch])
            if id_column not in table.column_names:
                numbers = pa.array(range(start, start + batch.num_rows), pa.int64())
                table = table.add_column(0, id_column, numbers)
            start += batch.num_rows
            writer.write_table(with_outputs(table, itertools.islice(lines, batch.num_rows), own))
