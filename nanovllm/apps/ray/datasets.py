"""`nanovllm.apps.ray.generate`: a model over a Ray Dataset, with an engine in each actor.

Ray Data reads, moves and retries blocks of rows. `output_path` makes the work resumable: this
process alone writes parts, and rows with ids in finished parts are left out.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence as Seq
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
from ray.data import ActorPoolStrategy, Dataset

from nanovllm.apps.batch.batch_options import BatchOptions, RowOptions, job_identity, sampling_of
from nanovllm.apps.batch.results import check_schema, output_fields, with_outputs
from nanovllm.apps.batch.row_engine import RowEngine
from nanovllm.apps.batch.rows import InputRow
from nanovllm.apps.ray.part_files import FORMATS, Parts, is_done
from nanovllm.apps.ray.row_pool import actor_resources
from nanovllm.errors import ConfigError
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.options.validation import check_choice, check_int, shown

_BLOCKS_AT_ONCE = 4
"""Blocks that an actor computes at the same time; while one ends, the others fill the engine."""


def generate(
    dataset: Dataset,
    *,
    model: str,
    sampling_params: SamplingParams | Mapping[str, Any] | None = None,
    prompt_column: str = "prompt",
    id_column: str = "id",
    output_path: str | None = None,
    output_format: str = "parquet",
    workers: int | tuple[int, int] = 1,
    block_rows: int = 64,
    worker_options: dict[str, Any] | None = None,
    lora_modules: Seq[str] = (),
    **options: Any,
) -> Dataset:
    """Return the dataset with the outputs of a model: see `OUTPUT_COLUMNS`.

    A row has `prompt_column`, or "messages", and perhaps "sampling_params". One that cannot be
    computed has its error in the column "error". Seeds are made from ids, so that the number of
    workers, and which of them die, change nothing.

    Args:
        sampling_params: for all rows. A dictionary has the fields that are not the checkpoint's
            recommendations; None is all of these.
        id_column: column with ids, each once. Without it a row's id is a digest of its columns.
        output_path: a directory for parts. The rows are then computed now; the same call after a
            crash computes those that are in no part. It needs the column of ids.
        output_format: of the parts, "parquet" or "jsonl".
        workers: number of actors, or the least and the most of them: Ray Data then scales.
        block_rows: rows of one task of an actor, which computes four tasks at once.
        worker_options: of each actor, such as {"num_cpus": 8}.
        lora_modules: adapters that rows name in the column "model", each name=path.
        options: the fields of `Config`.

    Raises:
        ConfigError: an option is invalid, or the directory holds rows of another job.
    """
    checked = BatchOptions(
        prompt_column=prompt_column,
        id_column=id_column,
        worker_options=worker_options,
        lora_modules=tuple(lora_modules),
    )
    check_int(ConfigError, "block_rows", block_rows, 1)
    check_choice(ConfigError, "output_format", output_format, FORMATS)
    rows = _row_options(model, sampling_params, checked, options)
    stage: dict[str, Any] = {
        "compute": _strategy(workers),
        **(actor_resources(rows) if worker_options is None else worker_options),
    }
    if output_path is None:
        return _generated(dataset, rows, None, block_rows, stage)
    with Parts(Path(output_path), job_identity(rows), output_format, id_column) as parts:
        left = _without_done(dataset, parts.done_ids(), id_column)
        generated = _generated(left, rows, output_format, block_rows, stage)
        for table in generated.iter_batches(batch_size=None, batch_format="pyarrow"):
            parts.add(table)
    return _read(parts.files(), output_format) or generated  # of no rows


def _read(files: Iterable[Path], output_format: str) -> Dataset | None:
    """Return what parts hold, None if there is no part."""
    paths = [str(path.absolute()) for path in files]
    if not paths:
        return None
    if output_format == "parquet":
        return ray.data.read_parquet(paths)
    return ray.data.read_json(paths, lines=True)


def _generated(
    dataset: Dataset,
    rows: RowOptions,
    output_format: str | None,
    block_rows: int,
    stage: Mapping[str, Any],
) -> Dataset:
    """Return the dataset with outputs. Small blocks: those of an actor that dies are few."""
    return dataset.repartition(target_num_rows_per_block=block_rows).map_batches(
        RowsStage,
        fn_constructor_args=(rows, output_format),
        batch_size=None,
        batch_format="pyarrow",
        udf_modifying_row_count=False,
        **stage,
    )


class RowsStage:
    """An actor with an engine, for Ray Data.

    Args:
        output_format: of the parts that the rows will be written to; None if they are not.
    """

    def __init__(self, options: RowOptions, output_format: str | None) -> None:
        self._options = options
        self._output_format = output_format
        self._engine = RowEngine(options)

    async def __call__(self, table: pa.Table) -> pa.Table:
        """Return the rows with the columns of their outputs.

        Raises:
            ConfigError: they cannot be written; none has been computed.
        """
        if self._output_format == "parquet":
            try:
                check_schema(table.schema)
            except pa.ArrowException as error:
                raise ConfigError(
                    "the rows do not fit the columns of a Parquet file: "
                    f"{str(error).rstrip('.')}; use output_format='jsonl'"
                ) from None
        rows = [InputRow(None, fields) for fields in table.to_pylist()]
        lines = await asyncio.gather(*map(self._engine.answer, rows))
        return with_outputs(table, lines, output_fields(self._options.sampling.get("n", 1)))


def _row_options(
    model: str,
    sampling: SamplingParams | Mapping[str, Any] | None,
    batch: BatchOptions,
    options: Mapping[str, Any],
) -> RowOptions:
    if not isinstance(sampling, SamplingParams | Mapping | None):
        raise ConfigError(
            f"sampling_params must be SamplingParams or a dictionary, got {shown(sampling)}"
        )
    given = sampling_of(sampling) if isinstance(sampling, SamplingParams) else dict(sampling or {})
    return RowOptions(
        model=model,
        engine_options=options,
        sampling=given,
        is_complete=isinstance(sampling, SamplingParams),
        batch=batch,
    )


def _strategy(workers: Any) -> ActorPoolStrategy:
    least, most = workers if isinstance(workers, tuple) and len(workers) == 2 else (workers,) * 2
    check_int(ConfigError, "workers", least, 1)
    check_int(ConfigError, "workers", most, least)
    return ActorPoolStrategy(
        min_size=least,
        max_size=most,
        max_concurrent_calls_per_actor=_BLOCKS_AT_ONCE,
        max_tasks_in_flight_per_actor=2 * _BLOCKS_AT_ONCE,
    )


def _check_ids(dataset: Dataset, id_column: str) -> None:
    schema = dataset.schema()
    if schema is not None and id_column not in schema.names:
        raise ConfigError(
            f"output_path needs ids, and the dataset has no column {shown(id_column)}, only "
            f"{', '.join(schema.names)}: name another id_column"
        )


def _without_done(dataset: Dataset, done: Any, id_column: str) -> Dataset:
    """Return the rows whose ids are not among those of finished parts.

    Raises:
        ConfigError: there is no column of ids.
    """
    _check_ids(dataset, id_column)
    if not len(done):
        return dataset
    kept = ray.put(done)

    def left(table: pa.Table) -> pa.Table:
        found = is_done(ray.get(kept), table.column(id_column).to_pylist())
        return table.filter(pa.array([not item for item in found], pa.bool_()))

    return dataset.map_batches(left, batch_format="pyarrow")
