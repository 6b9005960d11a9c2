"""`nanovllm batch`: the rows of a file through a model, each exactly once."""

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nanovllm import demo_model
from nanovllm.apps.batch.batch_options import BatchOptions, RowOptions
from nanovllm.apps.batch.job import Finished, Pool, Progress, run_job
from nanovllm.apps.batch.rows import ROW, Source
from nanovllm.errors import ConfigError
from nanovllm.options.config import Config
from nanovllm.options.flags import Subparsers, add_command, add_own_and_engine_flags, given_fields
from nanovllm.options.validation import shown
from nanovllm.utils.terminal import complain

_QUIET_SECONDS = 30
"""Between two lines of progress, where standard error is not a terminal."""
_SOME_FAILED = 1
"""The exit status where rows have errors."""
_AGAIN = "the same command resumes here"
_MORE = (
    f"Each line of INPUT is a row of OpenAI's batch format, such as {ROW}; sampling parameters are "
    "in the body. OUTPUT has OpenAI's lines in the same order. The exit status is 0, or 1 if rows "
    "have errors. After a crash, the same command resumes."
)


def add_batch(commands: Subparsers) -> None:
    """Add `batch` to the commands."""
    words = "INPUT OUTPUT [--model MODEL] [--workers N] [flags]"
    parser = add_command(commands, batch, words, "batch takes an INPUT and an OUTPUT", _MORE)
    parser.add_argument("input", metavar="INPUT", help="A .jsonl file.")
    parser.add_argument(
        "output", metavar="OUTPUT", help="A .jsonl file, made when all rows are done."
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="A checkpoint directory, a GGUF file or a hub id. (default: as for generate)",
    )
    add_own_and_engine_flags(parser, {"batch": (BatchOptions, ())}, "model")


def batch(args: argparse.Namespace) -> int:
    """Answer each row of OpenAI's batch file; a killed job resumes where it stopped."""
    batch_options = BatchOptions(**given_fields(BatchOptions, args))
    engine_options = given_fields(Config, args)
    model = engine_options.pop("model") or demo_model.default_model()
    options = RowOptions(model, engine_options, batch_options)
    source = Source(Path(args.input))
    output = Path(args.output)
    try:
        with _progress() as on_progress:
            finished = run_job(source, output, options, _make_pool, on_progress)
    except OSError as error:  # a full disk
        reason = error.strerror or error
        raise ConfigError(
            f"the output {shown(args.output)} cannot be written: {reason}; {_AGAIN}"
        ) from None
    except KeyboardInterrupt:
        complain(f"nanovllm: interrupted; {_AGAIN}")
        raise
    complain(_summary(finished, args.output))
    return _SOME_FAILED if finished.num_failed else 0


def _make_pool(options: RowOptions) -> Pool:
    """Return the engines: one in this process, or actors of Ray. Imports the server."""
    if not options.batch.uses_ray:
        from nanovllm.apps.batch.row_engine import RowEngine

        return RowEngine(options)
    from nanovllm.apps.ray.row_pool import RayPool

    return RayPool(options)


def _summary(finished: Finished, output: str) -> str:
    failed = f", {finished.num_failed} with an error: see its line" if finished.num_failed else ""
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
