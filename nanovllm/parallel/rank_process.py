"""A process that runs one rank: executes the messages that arrive on a connection, in order."""

import contextlib
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from logging.handlers import QueueHandler
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tqdm.auto import tqdm

from nanovllm.core.messages import Schedule
from nanovllm.errors import NanoVLLMError
from nanovllm.parallel.rank_setup import make_runner, rank_platform
from nanovllm.platform import Platform
from nanovllm.utils.distributed import init_tensor_parallel
from nanovllm.worker.kv_cache import memory_errors
from nanovllm.worker.model_loader import NetworkSpec
from nanovllm.worker.model_runner import ModelRunner
from nanovllm.worker.step_output import PendingResult
from nanovllm.worker.warm_up import allocate, measure

if TYPE_CHECKING:
    from nanovllm.features.structured.grammar import GrammarCompiler


class RankJob(NamedTuple):
    """What one rank is to run, and where it finds the others."""

    rank: int
    size: int
    store_at: tuple[str, int]  # address and port of the group's store
    own_address: str
    num_threads: int
    log_level: int  # of the records that rank 0 sends; others send only warnings and errors


Prepare = Callable[[], tuple[Platform, NetworkSpec, NetworkSpec | None]]
"""Returns a rank's device, its network and its draft network, or raises the user's error."""


class Command(NamedTuple):
    """A call of `function(runner, *arguments)`, in the order of the steps around it."""

    function: Callable[..., Any]  # of a module: its name is what is sent to other processes
    arguments: tuple[Any, ...]


class CommandResult(NamedTuple):
    """What one rank's call returned, or the mistake of the user that it found."""

    value: Any = None
    error: NanoVLLMError | None = None


def run_spawned(
    job: RankJob, pipe: Connection, target: NetworkSpec, draft: NetworkSpec | None
) -> None:
    """Run a spawned rank until the pipe closes or the parent dies. Then exit at once: Python takes
    half a second to take torch apart, and a GPU's driver frees what it has.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=_die_with_parent, daemon=True).start()
    run_rank(job, pipe, lambda: (rank_platform(target.config, job.rank), target, draft))
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stdout.flush()  # what a logits processor printed
    os._exit(0)


def run_rank(job: RankJob, pipe: Connection, prepare: Prepare) -> None:
    """Send what the rank can hold, allocate, then execute schedules until the pipe closes.

    The messages in are a WorkerInfo, then Schedules and Commands, and for a rank that samples a
    GrammarCompiler before the first Schedule with a grammar. Every message out is ("ok", value),
    ("log", record) or ("error", exception).

    Raises:
        Exception: what ended the rank, unless it is nanovllm's own; it is sent first.
    """
    # tqdm's default lock is a named semaphore, which outlives a killed process.
    tqdm.set_lock(threading.RLock())
    outbox = _Outbox(pipe, job.rank)
    runner = None
    _send_log(outbox, job)
    try:
        platform, target, draft = prepare()
        platform.make_current(job.num_threads)
        if job.size > 1:
            group = platform.device, platform.collectives, job.own_address
            init_tensor_parallel(job.rank, job.size, job.store_at, *group)
        with memory_errors(target.config):
            runner = make_runner(target, platform, draft)
            outbox.put(measure(runner))
            outbox.put(allocate(runner, pipe.recv()))
        while True:
            message: GrammarCompiler | Schedule | Command = pipe.recv()
            if isinstance(message, Schedule):
                pending = runner.execute(message)
                if job.rank == 0:
                    outbox.put(pending)
            elif isinstance(message, Command):
                outbox.put(_called(runner, message))
            else:
                from nanovllm.features.structured.grammar_masks import GrammarMasks

                runner.masks = GrammarMasks(message)
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the engine closed the pipe
        if runner is not None and runner.config.has_tiers:
            runner.free()  # it writes what is queued
    except BaseException as error:
        outbox.close(error)
        if not isinstance(error, NanoVLLMError):
            raise


def _called(runner: ModelRunner, command: Command) -> CommandResult:
    """Call the function of `command`. What it raises ends the rank, except a user's mistake."""
    try:
        with torch.inference_mode():
            return CommandResult(command.function(runner, *command.arguments))
    except NanoVLLMError as error:
        if type(error) is NanoVLLMError:  # it wraps a crash
            raise
        return CommandResult(error=error)


class _Outbox:
    """Sends a rank's messages in order, in its own thread: so the rank launches the next step while
    the last step's tokens are still being computed.
    """

    def __init__(self, pipe: Connection, rank: int) -> None:
        self._pipe = pipe
        self._rank = rank
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, value: Any) -> None:
        """Send `value`, or the result of a launched step."""
        self._queue.put(value)

    def close(self, error: BaseException) -> None:
        """Send `error` as the last message and wait until it is sent."""
        self._queue.put(error)
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                value = self._queue.get()
                if isinstance(value, BaseException):
                    raise value
                if isinstance(value, PendingResult):
                    value = value.result()
                self._pipe.send(("log" if isinstance(value, logging.LogRecord) else "ok", value))
            except OSError:  # the parent closed the pipe
                return
            except BaseException as error:
                known = isinstance(error, NanoVLLMError)
                message = error if known else NanoVLLMError(f"rank {self._rank}: {error!r}")
                with contextlib.suppress(OSError):
                    self._pipe.send(("error", message))
                return


def _send_log(outbox: _Outbox, job: RankJob) -> None:
    """From now on, send what the rank logs to the engine, whose log it joins."""
    package = logging.getLogger("nanovllm")
    package.setLevel(job.log_level if job.rank == 0 else max(job.log_level, logging.WARNING))
    package.propagate = False  # a spawned rank has imported the program, which may log, too
    package.addHandler(_SentLog(outbox, job.rank))


class _SentLog(QueueHandler):
    """Puts records into the outbox of a rank."""

    def __init__(self, outbox: _Outbox, rank: int) -> None:
        super().__init__(outbox)  # type: ignore[arg-type]  # only `enqueue` uses it
        self._outbox = outbox
        self._prefix = f"rank {rank}: " if rank else ""

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Return a copy of `record` that can be pickled, with the rank's number."""
        prepared: logging.LogRecord = super().prepare(record)
        prepared.msg = prepared.message = f"{self._prefix}{prepared.message}"
        return prepared

    def enqueue(self, record: logging.LogRecord) -> None:
        self._outbox.put(record)


def _die_with_parent() -> None:
    """Exit as soon as the parent process has died."""
    parent = parent_process()
    assert parent is not None
    # A process that the parent forked keeps the sentinel open.
    while os.getppid() == parent.pid and not wait([parent.sentinel], timeout=1.0):
        pass
    os._exit(1)
