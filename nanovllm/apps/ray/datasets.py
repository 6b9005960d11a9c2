"""`nanovllm.apps.ray.generate`: a model over a Ray Dataset, with an engine in each actor.

Ray Data reads, moves and retries blocks of rows.
"""

import asyncio
from collections.abc import Mapping, Sequence as Seq
from typing import Any

import pyarrow as pa
from ray.data import ActorPoolStrategy, Dataset

from nanovllm.apps.batch.batch_options import BatchOptions, RowOptions
from nanovllm.apps.batch.results import output_fields, with_outputs
from nanovllm.apps.batch.row_engine import RowEngine
from nanovllm.apps.batch.rows import InputRow
from nanovllm.apps.ray.row_pool import actor_resources
from nanovllm.errors import ConfigError
from nanovllm.options.validation import check_int, check_names

_BLOCKS_AT_ONCE = 4
"""Blocks that an actor computes at the same time; while one ends, the others fill the engine."""


def generate(
    dataset: Dataset,
    *,
    model: str,
    sampling_params: Mapping[str, Any] | None = None,
    prompt_column: str = "prompt",
    id_column: str = "id",
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
        sampling_params: for all rows, the fields of SamplingParams that are not the checkpoint's
            recommendations.
        id_column: column with ids. A row without one has a digest of its columns.
        workers: number of actors, or the least and the most of them: Ray Data then scales.
        block_rows: rows of one task of an actor, which computes four tasks at once.
        worker_options: of each actor, such as {"num_cpus": 8}.
        lora_modules: adapters that rows name in the column "model", each name=path.
        options: the fields of `Config`.

    Raises:
        ConfigError: an option is invalid.
    """
    checked = BatchOptions(
        prompt_column=prompt_column,
        id_column=id_column,
        worker_options=worker_options,
        lora_modules=tuple(lora_modules),
    )
    check_int(ConfigError, "block_rows", block_rows, 1)
    sampling = {} if sampling_params is None else sampling_params
    sampling = check_names(ConfigError, "sampling_params", sampling)
    rows = RowOptions(model=model, engine_options=options, sampling=sampling, batch=checked)
    stage: dict[str, Any] = {
        "compute": _strategy(workers),
        **(actor_resources(rows) if worker_options is None else worker_options),
    }
    # Small blocks: those of an actor that dies are few.
    return dataset.repartition(target_num_rows_per_block=block_rows).map_batches(
        RowsStage,
        fn_constructor_args=(rows,),
        batch_size=None,
        batch_format="pyarrow",
        udf_modifying_row_count=False,
        **stage,
    )


class RowsStage:
    """An actor with an engine, for Ray Data."""

    def __init__(self, options: RowOptions) -> None:
        self._options = options
        self._engine = RowEngine(options)

    async def __call__(self, table: pa.Table) -> pa.Table:
        """Return the rows with the columns of their outputs."""
        rows = [InputRow(None, fields) for fields in table.to_pylist()]
        lines = await asyncio.gather(*map(self._engine.answer, rows))
        return with_outputs(table, lines, output_fields(self._options.sampling.get("n", 1)))


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
