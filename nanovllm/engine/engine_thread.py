"""`EngineThread`: the one thread that calls an engine, for `LLM` and for `AsyncLLM`.

`FairExecutor` has the threads that make requests.
"""

import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from nanovllm.engine.llm_engine import LLMEngine, run_logged
from nanovllm.engine.reader import AnyReader, Item, send
from nanovllm.engine.request import Request
from nanovllm.errors import EngineDeadError, NanoVLLMError, log_failure
from nanovllm.outputs import RequestOutput

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class EngineThread(threading.Thread):
    """Owns the engine and runs its steps, while a request that has a reader is unfinished.

    Other threads submit commands; only this thread calls the engine, and runs commands in order
    between steps. So a signal never interrupts the engine, only those that wait for it.

    An exception in a step ends the requests that have readers, which get it; one in ending a
    request is logged. If requests cannot be ended, the thread ends and tells every reader.
    A panic of a Rust library is a `BaseException` and no `Exception`.

    Args:
        owner: the class that made it, for errors.
    """

    def __init__(self, engine: LLMEngine, owner: str) -> None:
        super().__init__(name="nanovllm-engine", daemon=True)
        self.engine = engine
        self._owner = owner
        self.inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.readers: dict[AnyReader, int | str] = {}  # those of running requests, with their ids
        self._deliveries: list[tuple[AnyReader, Item]] = []  # not sent yet
        self.has_ended = False
        self._failure: EngineDeadError | None = None
        self.start()

    def run(self) -> None:
        end = EngineDeadError(f"the engine was shut down; make a new {self._owner}")
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
        self.engine.check_health()

    def stop(self) -> None:
        """End the thread and the engine; wait for that, unless this thread calls. May be called
        again, also by the garbage collector and at Python's exit.
        """
        self.inbox.put(None)
        if self is not threading.current_thread():
            self.join()

    def submit(self, command: Callable[[], Result]) -> Future[Result]:
        """Run `command` in the engine's thread between two steps; its result comes after the
        outputs that it delivers. Once that thread has ended it runs here, on a dead engine.

        Raises:
            EngineDeadError: the engine was made before this process was forked.
            NanoVLLMError: it is this thread that calls, and would wait for itself.
        """
        done = Future[Result]()
        self._submit(done, command)
        return done

    def call(self, command: Callable[[], Result]) -> Result:
        """Submit a command and return its result. A signal may interrupt the wait anywhere; the
        command runs all the same.
        """
        done = Future[Result]()
        # Not `Future.result`, which a signal may leave with the lock that this thread needs.
        arrived: queue.SimpleQueue[Future[Result]] = queue.SimpleQueue()
        done.add_done_callback(arrived.put)
        self._submit(done, command)
        return arrived.get().result()

    def _submit(self, done: Future[Result], command: Callable[[], Result]) -> None:
        self.engine.owner.check()
        if self is threading.current_thread():
            raise NanoVLLMError(
                "this thread is running a step of this LLM already: a callback cannot use the LLM "
                "that calls it"
            )
        self._put(partial(fulfil, done, partial(self._deliver_after, command)))

    def post(self, command: Callable[[], object]) -> None:
        """Submit a command whose error is logged, from any thread at any moment: the garbage
        collector is one. Ignored in a forked process, and once the engine was shut down.
        """
        if not self.engine.is_shut_down and self.engine.owner.is_this:
            self._put(partial(run_logged, command))

    def start_request(self, reader: AnyReader, request: Request) -> None:
        """Queue a request; its reader gets the outputs, or the error that ends it.

        Raises:
            NanoVLLMError: as `LLMEngine.queue`.
        """
        self.engine.queue(request, partial(self._deliver, reader))
        self.readers[reader] = request.request_id

    def close(self, reader: AnyReader) -> None:
        """End a reader's request if it is running."""
        request_id = self.readers.pop(reader, None)  # first: what abort() delivers is not read
        if request_id is not None:
            self.engine.abort(request_id)

    def _put(self, command: Callable[[], None]) -> None:
        self.inbox.put(command)
        if self.has_ended:  # the thread may not look into its inbox again
            self._drain_inbox()

    def _run_steps(self) -> None:
        while self._run_commands():
            try:
                self.engine.run_step()
                self._deliver_all()
            except BaseException as error:
                failed = list(self.readers.values())
                self._fail_all(error)
                # Those that cannot be aborted would fail in each step, for ever.
                if not self.engine.output_processor.requests.keys().isdisjoint(failed):
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
        """Run the submitted commands; wait for one while there is no step to run. Return False if
        the thread must stop.
        """
        engine = self.engine
        while True:
            runs = self.readers and engine.scheduler.num_unfinished
            is_idle = engine.is_paused or not runs
            if is_idle:
                engine.run_last_steps()
            try:
                command = self.inbox.get(block=is_idle)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            del command  # else it would keep what it holds alive until the next one

    def _drain_inbox(self) -> None:
        """Run the commands that came too late; a new request fails, as the engine is down."""
        with contextlib.suppress(queue.Empty):
            while True:
                command = self.inbox.get_nowait()
                if command is not None:
                    command()

    def _deliver(self, reader: AnyReader, output: RequestOutput) -> None:
        """Keep an output for `_deliver_all`, unless its reader has its request's end already."""
        if reader in self.readers:
            self._deliveries.append((reader, output))
            if output.finished:
                del self.readers[reader]

    def _deliver_all(self) -> None:
        """Give all outputs of a step to their readers: one wake-up of each event loop."""
        deliveries, self._deliveries = self._deliveries, []
        send(deliveries)

    def _deliver_after(self, command: Callable[[], Result]) -> Result:
        try:
            return command()
        finally:
            self._deliver_all()

    def _fail_all(self, error: BaseException) -> None:
        """Send `error` to every reader, and then abort the requests; one that fails stops none."""
        readers, self.readers = self.readers, {}
        self._deliveries += [(reader, error) for reader in readers]
        self._deliver_all()
        for request_id in readers.values():
            run_logged(partial(self.engine.abort, request_id))


class FairExecutor:
    """Runs functions in threads, in which users take turns: a job waits for its user's earlier
    jobs, which begin in order, and for one job of each other user between any two of those.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(num_threads, name)
        self._lock = threading.Lock()
        # By user; the users in the order of their turns. None has no job.
        self._jobs: dict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = {}

    def submit(self, user: str, function: Callable[..., Result], *args: Any) -> Future[Result]:
        """Run a function when it is its user's turn.

        Raises:
            RuntimeError: the executor was shut down.
        """
        future: Future[Result] = Future()
        with self._lock:
            self._pool.submit(self._run_next)
            self._jobs.setdefault(user, deque()).append((future, partial(function, *args)))
        return future

    def shutdown(self) -> None:
        """Take no more jobs. Those that were submitted still run; this does not wait for them."""
        self._pool.shutdown(wait=False)

    def _run_next(self) -> None:
        with self._lock:
            user = next(iter(self._jobs))
            jobs = self._jobs.pop(user)
            future, function = jobs.popleft()
            if jobs:
                self._jobs[user] = jobs  # after the others
        fulfil(future, function)


def fulfil(future: Future[Result], function: Callable[[], Result]) -> None:
    """Give a future what a function returns or raises. If it was cancelled, do nothing."""
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(function())
        except BaseException as error:  # a panic of a Rust library is no Exception
            future.set_exception(error)
