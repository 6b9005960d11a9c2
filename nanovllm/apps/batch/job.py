"""A job: gives the rows of a file to engines, keeps what is finished, and writes the output.

The only writer of the job's files.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from nanovllm.apps.batch.batch_options import RowOptions, job_identity
from nanovllm.apps.batch.job_files import JobFiles, Journal
from nanovllm.apps.batch.rows import InputRow, Source, check_name
from nanovllm.errors import ConfigError

_MIN_WINDOW = 1024
"""Rows from the oldest unfinished one on that a job may have begun. It bounds the memory."""
_WINDOW_CAPACITIES = 8
"""The same, as a multiple of how many rows are computed at once."""


class Pool(Protocol):
    """Engines that answer rows, here or elsewhere."""

    @property
    def capacity(self) -> int:
        """How many rows to have in it at once."""

    async def start(self) -> None:
        """Make the engines. Raises NanoVLLMError."""

    async def answer(self, row: InputRow) -> bytes:
        """Return the output of a row as a line of JSON. Raises NanoVLLMError."""

    def close(self) -> None:
        """End the engines."""


class Progress(NamedTuple):
    """How far a job is."""

    num_rows: int
    num_done: int
    num_failed: int
    """Rows with an error, of those that this process computed."""


class Finished(NamedTuple):
    """What became of a job."""

    num_rows: int
    num_failed: int
    """Rows with an error, of all."""
    num_before: int
    """Rows that were done before this process began."""
    seconds: float
    """For computing the others, without the start of the engines."""


def run_job(
    source: Source,
    output: Path,
    options: RowOptions,
    make_pool: Callable[[RowOptions], Pool],
    on_progress: Callable[[Progress], object] = lambda progress: None,
) -> Finished:
    """Do what is not done of a job, and write its output.

    Args:
        make_pool: called if a row is to be computed.

    Raises:
        ConfigError: an option is invalid, or `JobFiles` refuses.
        NanoVLLMError: the engines cannot be made, or die again and again.
    """
    check_name(output)
    if output.exists() and output.samefile(source.path):
        raise ConfigError(f"the output {output} is the input: name another")
    files = JobFiles(output, job_identity(options, source.digest))
    try:
        journal = files.journal
        num_before = len(journal)
        seconds = 0.0
        num_failed = files.num_failed
        if num_failed is None:
            if num_before < source.num_rows:
                pool = make_pool(options)
                seconds = asyncio.run(answer_rows(source, pool, journal, on_progress))
            source.check_unchanged()
            num_failed = sum(map(_is_failed, journal.in_order()))
            with files.writing(num_failed) as file:
                file.writelines(line + b"\n" for line in journal.in_order())
        else:
            num_before = source.num_rows
        files.remove()
        return Finished(source.num_rows, num_failed, num_before, seconds)
    finally:
        files.close()


def _is_failed(output: bytes) -> bool:
    """Whether a line of output has an error: its last field is null if not."""
    return not output.endswith(b'"error": null}')


async def answer_rows(
    source: Source, pool: Pool, journal: Journal, on_progress: Callable[[Progress], object]
) -> float:
    """Compute what is not done, then close the pool; return the seconds that engines computed."""
    try:
        await pool.start()
        start = time.monotonic()
        await _Dispatch(pool, journal).run(source, on_progress)
        return time.monotonic() - start
    finally:
        pool.close()


class _Dispatch:
    """Keeps a pool full of rows, in the order of the input, until all are done."""

    def __init__(self, pool: Pool, journal: Journal) -> None:
        self._pool = pool
        self._journal = journal
        self._tasks: set[asyncio.Task[None]] = set()
        self._finished: asyncio.Queue[tuple[InputRow, bytes | BaseException]] = asyncio.Queue()
        self._num_running = 0
        self._num_failed = 0

    async def run(self, source: Source, on_progress: Callable[[Progress], object]) -> None:
        """Compute the rows that are not in the journal. Raises what the pool raises."""
        rows = (row for row in source.rows() if row.number not in self._journal)
        try:
            row = self._begin(rows, next(rows, None))
            while self._num_running:
                self._keep(*await self._finished.get())
                while not self._finished.empty():
                    self._keep(*self._finished.get_nowait())
                row = self._begin(rows, row)
                done = len(self._journal)
                on_progress(Progress(source.num_rows, done, self._num_failed))
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, rows: Iterator[InputRow], row: InputRow | None) -> InputRow | None:
        """Begin rows from `row` on while there is room; return the first that was not begun."""
        capacity = self._pool.capacity
        window = max(_MIN_WINDOW, _WINDOW_CAPACITIES * capacity)
        while row is not None and self._num_running < capacity:
            if row.number >= self._journal.num_leading + window:
                break
            task = asyncio.create_task(self._answer(row))
            self._num_running += 1
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            row = next(rows, None)
        return row

    async def _answer(self, row: InputRow) -> None:
        try:
            output: bytes | BaseException = await self._pool.answer(row)
        except Exception as error:
            output = error
        self._finished.put_nowait((row, output))

    def _keep(self, row: InputRow, output: bytes | BaseException) -> None:
        self._num_running -= 1
        if isinstance(output, BaseException):
            raise output
        self._num_failed += _is_failed(output)
        self._journal.append(row.number, output)
