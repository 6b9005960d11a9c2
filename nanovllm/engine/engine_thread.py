"""`EngineThread`: one thread runs an engine for the asyncio tasks of a process."""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from functools import partial

from nanovllm.engine.commands import run_logged
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.reader import Item, Reader, send
from nanovllm.engine.request import Request
from nanovllm.errors import EngineDeadError, log_failure
from nanovllm.outputs import RequestOutput

logger = logging.getLogger(__name__)


class EngineThread(threading.Thread):
    """Owns the engine and runs its steps.

    Other threads submit commands; only this thread calls the engine, and runs commands in order
    between steps.

    An exception in a step ends the requests that run; one in a command, or in ending a request, is
    logged. If requests cannot be ended, the thread ends, and tells every reader. `BaseException` is
    caught, because a panic of a Rust library is no `Exception`.
    """

    def __init__(self, engine: LLMEngine) -> None:
        super().__init__(name="nanovllm-engine", daemon=True)
        self.engine = engine
        self.inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.readers: dict[Reader, int | str] = {}  # those of running requests, with their ids
        self._deliveries: list[tuple[Reader, Item]] = []  # not sent yet
        self.has_ended = False
        self._failure: EngineDeadError | None = None

    def run(self) -> None:
        end = EngineDeadError("the engine was shut down; make a new AsyncLLM")
        try:
            self._run_steps()
        except BaseException as error:
            log_failure(logger, error, "the engine's thread failed")
            if isinstance(error, EngineDeadError):
                end = error
            else:
                message = "the engine's thread failed; the log says why: make a new engine"
                end = EngineDeadError(message)
                end.__cause__ = error
            self._failure = end
        finally:
            self._end(end)

    def check_health(self) -> None:
        """Raise EngineDeadError if the engine is down, or this thread has failed."""
        if self._failure is not None:
            raise self._failure
        self.engine.executor.check_health()

    def submit(self, command: Callable[[], None]) -> None:
        """Make the thread run `command` between two steps.

        After the thread has ended, the command runs here, and the engine raises EngineDeadError.
        """
        self.inbox.put(command)
        if self.has_ended:  # the thread may not look into its inbox again
            self._drain_inbox()

    def start_request(self, reader: Reader, request: Request) -> None:
        """Queue a request; its reader gets the outputs, or the error if it fails."""
        if reader.is_closed:
            return
        try:
            self.engine.queue(request, partial(self._deliver, reader))
        except BaseException as error:
            send([(reader, error)])
        else:
            reader.sends_all = request.sends_all
            self.readers[reader] = request.request_id

    def close(self, reader: Reader) -> None:
        """End a reader's request if it is running."""
        request_id = self.readers.pop(reader, None)  # first: what abort() delivers is not read
        if request_id is not None:
            self.engine.abort(request_id)

    def _run_steps(self) -> None:
        while self._run_commands():
            try:
                self.engine.run_step()
                self.deliver_all()
            except BaseException as error:
                self._fail_all(error)
                if self.engine.has_sequences:  # they would fail in each step, for ever
                    raise

    def _end(self, error: EngineDeadError) -> None:
        """Fail what runs or still comes, and end the engine, whatever of this fails."""
        try:
            self._fail_all(error)
            self.engine.run_last_steps()
        finally:
            try:
                self.engine.shutdown()
            finally:
                self.has_ended = True
                self._drain_inbox()

    def _run_commands(self) -> bool:
        """Run the submitted commands; wait for one while no request runs, or the engine is paused.

        Returns:
            False if the thread must stop.
        """
        while True:
            try:
                is_idle = self.engine.is_paused or self.engine.is_finished()
                command = self.inbox.get(block=is_idle)
            except queue.Empty:
                return True
            if command is None:
                return False
            run_logged(command)

    def _drain_inbox(self) -> None:
        """Run the commands that came too late; a new request fails, as the engine is down."""
        with contextlib.suppress(queue.Empty):
            while True:
                command = self.inbox.get_nowait()
                if command is not None:
                    run_logged(command)

    def _deliver(self, reader: Reader, output: RequestOutput) -> None:
        """Keep an output for `deliver_all`, unless its reader has its request's end already."""
        if reader in self.readers:
            self._deliveries.append((reader, output))
            if output.finished:
                del self.readers[reader]

    def deliver_all(self) -> None:
        """Give all outputs of a step to their readers: one wake-up of each event loop."""
        deliveries, self._deliveries = self._deliveries, []
        send(deliveries)

    def _fail_all(self, error: BaseException) -> None:
        """Send `error` to every reader, and then abort the requests; one that fails stops none."""
        readers, self.readers = self.readers, {}
        self._deliveries += [(reader, error) for reader in readers]
        self.deliver_all()
        self.engine.abort_all(readers.values())
