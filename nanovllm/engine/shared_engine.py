"""Lets many threads use one engine: one of them at a time runs its steps, for all of them."""

import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence as Seq
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any

from nanovllm.engine.commands import DelayedInterrupt, Result, fulfil, run_logged
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.request import Request
from nanovllm.errors import NanoVLLMError
from nanovllm.outputs import RequestOutput

Mailbox = SimpleQueue[Any]
"""Where one thread waits for items. The item None means: look whether to run the steps."""


class SharedEngine:
    """An `LLMEngine` for many threads. Their requests share its batches.

    A thread that waits for an item becomes the leader if there is none. The leader runs commands
    and steps until its own item has come; then it leaves, and a waiting thread becomes the leader.
    Commands, such as new requests, run between two steps.

    An exception in a step is raised in the leader only. The next leader goes on. An exception in a
    command is raised in the thread that called it, or logged if it does not wait.

    Hazard: the garbage collector may call `submit` (by closing a stream) in any thread, between any
    two lines of this class. So the lock is reentrant, and nothing waits while it is held.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._commands: deque[Callable[[], object]] = deque()
        self._lock = threading.RLock()  # guards the next three
        self._leader: Mailbox | None = None
        self._leading_thread: int | None = None
        self._waiting: dict[Mailbox, None] = {}  # in the order of arrival

    def run(self, requests: Seq[Request]) -> Generator[RequestOutput, None, None]:
        """Queue requests; return a generator of their outputs. Closing it aborts the rest.

        Raises:
            EngineDeadError, NanoVLLMError: as `receive`.
        """
        outputs = self._outputs(requests)
        next(outputs)  # queue them, inside its try block
        return outputs

    def _outputs(self, requests: Seq[Request]) -> Generator[Any, None, None]:
        """Queue requests, yield None once, then yield their outputs as they come."""
        mailbox: Mailbox = SimpleQueue()
        unfinished = {request.request_id: request for request in requests}

        def queue_all() -> None:
            for request in requests:
                self._engine.queue(request, mailbox.put)

        try:
            self.call(queue_all)
            yield None  # run() takes this one
            while unfinished:
                output: RequestOutput = self.receive(mailbox)
                request = unfinished[output.request_id]
                if output.finished:
                    del unfinished[output.request_id]
                if not (request.stream and _is_aborted(output)):  # abort() has returned the rest
                    yield output
        finally:
            if unfinished:  # after an error or Ctrl-C, or the iterator was closed
                self.submit(lambda: self._engine.abort_all(unfinished))

    def receive(self, mailbox: Mailbox) -> Any:
        """Return the mailbox's next item; run steps until it comes, or wait while others do.

        Raises:
            EngineDeadError: the engine is down, or it was made before this process was forked.
            NanoVLLMError: this thread runs a step already: this is a callback or signal handler; or
                a step of another thread has failed, and the item will not come.
        """
        self._check_caller()
        item = None
        with DelayedInterrupt() as interrupt:
            try:
                while item is None:
                    if self._takes_lead(mailbox):
                        interrupt.interruptible(self._run_until_mail, mailbox)
                    item = interrupt.interruptible(mailbox.get)
            finally:  # others would wait for ever for a leader that has not left
                self._leave(mailbox)
        return item

    def call(self, command: Callable[[], Result]) -> Result:
        """Run a command between two steps and return its result, or raise its exception.

        Raises:
            EngineDeadError, NanoVLLMError: as `receive`.
        """
        self._check_caller()
        mailbox: Mailbox = SimpleQueue()
        done: Future[Result] = Future()
        done.add_done_callback(mailbox.put)
        self._commands.append(partial(fulfil, done, command))
        self.receive(mailbox)
        return done.result()

    def submit(self, command: Callable[[], object]) -> None:
        """Run a command now if there is no leader, otherwise let the leader run it; never wait.

        In a forked process, and once the engine was shut down, this does nothing.
        """
        if self._engine.is_shut_down or not self._engine.owner.is_this:
            return
        self._commands.append(partial(run_logged, command))
        turn: Mailbox = SimpleQueue()
        with DelayedInterrupt():
            self._takes_lead(turn)
            self._leave(turn)

    def _takes_lead(self, mailbox: Mailbox) -> bool:
        """Make the caller the leader if there is none, otherwise let it wait for its turn."""
        with self._lock:
            if self._leader is None:
                self._leader = mailbox
                self._leading_thread = threading.get_ident()
                self._waiting.pop(mailbox, None)
            elif self._leader is not mailbox:
                self._waiting[mailbox] = None
            return self._leader is mailbox

    def _leave(self, mailbox: Mailbox) -> None:
        """End the caller's turn or its wait. If there is no leader, wake a waiting thread."""
        while self._leader is mailbox:
            self._run_commands()  # no other thread may be there to run those of `submit`
            self._engine.run_last_steps()
            with self._lock:
                if not self._commands:
                    self._leader = self._leading_thread = None
        with self._lock:
            self._waiting.pop(mailbox, None)
            first = next(iter(self._waiting), None)
            if self._leader is None and first is not None:
                first.put(None)  # it stays in the list until it leads or leaves

    def _run_until_mail(self, mailbox: Mailbox) -> None:
        while mailbox.empty():
            self._run_commands()
            if mailbox.empty():
                if not self._engine.scheduler.num_unfinished:
                    raise NanoVLLMError(
                        "a step that another thread ran has failed, and with it the end of this "
                        "thread's request: try again"
                    )
                self._engine.run_step()

    def _run_commands(self) -> None:
        while self._commands:
            with DelayedInterrupt():
                self._commands.popleft()()

    def _check_caller(self) -> None:
        self._engine.owner.check()
        if self._leading_thread == threading.get_ident():
            raise NanoVLLMError(
                "this thread is running a step of this LLM already: a signal handler or a callback "
                "cannot use the LLM that it interrupts"
            )


def _is_aborted(output: RequestOutput) -> bool:
    return any(completion.finish_reason == "abort" for completion in output.outputs)
