"""`nanovllm batch`: the rows of a file through a model, each exactly once."""

import argparse
import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nanovllm import demo_model
from nanovllm.apps.batch.batch_options import BatchOptions, RowOptions
from nanovllm.apps.batch.job import Finished, Pool, Progress, run_job
from nanovllm.apps.batch.row_engine import RowEngine, check_form
from nanovllm.apps.batch.rows import OPENAI, ROWS
from nanovllm.apps.batch.sources import open_source
from nanovllm.apps.cli.flag_groups import (
    Commands,
    add_command,
    add_own_and_engine_flags,
    add_sampling_flags,
)
from nanovllm.errors import ConfigError
from nanovllm.options.config import Config
from nanovllm.options.flags import fields_of, given_fields
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.options.validation import shown
from nanovllm.utils.terminal import complain

_QUIET_SECONDS = 30
"""Between two lines of progress, where standard error is not a terminal."""
_SOME_FAILED = 1
"""The exit status where rows have errors."""
_AGAIN = "the same command continues where this one stopped"
_MORE = (
    'INPUT is JSON lines or Parquet: rows with a column "prompt" (text or token ids) or '
    '"messages", and perhaps "id" and "sampling_params"; or OpenAI\'s batch format. OUTPUT has the '
    "same rows with generated_text, generated_tokens, finish_reason, num_input_tokens, "
    "num_generated_tokens and error. The exit status is 0, or 1 if rows have errors. After a "
    "crash, the same command continues."
)


def add_batch(commands: Commands) -> None:
    """Add `batch` to the commands."""
    words = "INPUT OUTPUT [--model MODEL] [--workers N] [flags]"
    parser = add_command(commands, batch, words, "batch takes an INPUT and an OUTPUT", _MORE)
    parser.add_argument("input", metavar="INPUT", help="A .jsonl or .parquet file.")
    parser.add_argument(
        "output", metavar="OUTPUT", help="A .jsonl or .parquet file, made when all rows are done."
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="A checkpoint directory, a GGUF file or a hub id. (default: as for generate)",
    )
    add_own_and_engine_flags(parser, {"batch": (BatchOptions, ())}, "model")
    add_sampling_flags(parser)


def batch(args: argparse.Namespace) -> int:
    """Generate for each row of a file; a job that was killed continues where it stopped."""
    batch_options = BatchOptions(**given_fields(BatchOptions, args))
    engine_options = given_fields(Config, args)
    form = ROWS if batch_options.served_model_name is None else OPENAI
    source = open_source(Path(args.input), form)
    options = RowOptions(
        model=engine_options.pop("model") or demo_model.default_model(),
        engine_options=engine_options,
        sampling={
            name: value
            for name, value in given_fields(SamplingParams, args).items()
            if name not in fields_of(Config)
        },
        form=source.form,
        batch=batch_options,
    )
    check_form(options.form)
    output = Path(args.output)
    make_pool = _pool_of(options, batch_options)
    try:
        with _progress() as on_progress:
            finished = run_job(source, output, options, make_pool, on_progress)
    except OSError as error:  # a full disk
        reason = error.strerror or error
        raise ConfigError(
            f"the output {shown(args.output)} cannot be written: {reason}; {_AGAIN}"
        ) from None
    except KeyboardInterrupt:
        complain(f"nanovllm: interrupted; {_AGAIN}")
        raise
    complain(_summary(finished, args.output, options.form))
    return _SOME_FAILED if finished.num_failed else 0


def _pool_of(options: RowOptions, batch: BatchOptions) -> Callable[[], Pool]:
    """Return what makes the engines: one in this process, or actors of Ray."""
    if not batch.uses_ray:
        return lambda: RowEngine(options)
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "workers, ray_address and worker_options need Ray, which is not installed: "
            "pip install -e '.[ray]' -c constraints.txt"
        )
    from nanovllm.apps.ray.row_pool import RayPool

    return lambda: RayPool(
        options, batch.workers, address=batch.ray_address, actor_options=batch.worker_options
    )


def _summary(finished: Finished, output: str, form: str) -> str:
    place = "its error" if form == OPENAI else "the column error"
    failed = f", {finished.num_failed} with an error: see {place}" if finished.num_failed else ""
    before = f" ({finished.num_before} were done before)" if finished.num_before else ""
    rows = f"{finished.num_rows} rows{before}{failed}"
    return f"nanovllm: wrote {output}: {rows}; {finished.seconds:.1f} s"


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[Progress], object]]:
    """Yield what shows progress: a bar at a terminal, else a line now and then."""
    from tqdm import tqdm

    bar: Any = None
    said = time.monotonic()

    def show(progress: Progress) -> None:
        nonlocal bar, said
        if sys.stderr.isatty():
            if bar is None:
                bar = tqdm(total=progress.num_rows, initial=progress.num_done, unit="row")
            bar.update(progress.num_done - bar.n)
            if progress.num_failed:
                bar.set_postfix(errors=progress.num_failed, refresh=False)
        elif time.monotonic() - said >= _QUIET_SECONDS:
            said = time.monotonic()
            complain(
                f"nanovllm: {progress.num_done} of {progress.num_rows} rows, "
                f"{progress.num_failed} with an error"
            )

    try:
        yield show
    finally:
        if bar is not None:
            bar.close()
