"""How commands of many threads run on one engine: their results, their errors, and Ctrl-C."""

import logging
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType
from typing import Any, TypeVar

from nanovllm.errors import log_failure

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


def fulfil(future: Future[Result], function: Callable[[], Result]) -> None:
    """Give a future what a function returns or raises. If it was cancelled, do nothing."""
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(function())
        except BaseException as error:  # a panic of a Rust library is no Exception
            future.set_exception(error)


def run_logged(command: Callable[[], object]) -> None:
    """Run a command; one that fails must not end the thread that runs it, nor keep the next."""
    try:
        command()
    except BaseException as error:
        log_failure(logger, error, "a command to the engine failed")


class DelayedInterrupt:
    """Delays Ctrl-C until the end of a `with` block, so that what it changes stays consistent.

    Only the main thread is ever interrupted, and only by a handler that is written in Python.
    """

    def __init__(self) -> None:
        self._handler: Any = None
        self._frame: FrameType | None = None
        self._came = False
        self._delays = True

    def __enter__(self) -> "DelayedInterrupt":
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            found = signal.signal(signal.SIGINT, self._handler)
            if found != self._handle:  # the block has set another handler
                signal.signal(signal.SIGINT, found)
            self._delays = False  # for code that keeps `_handle` and sets it again
            self._pass_on()

    def interruptible(self, function: Callable[..., Result], *args: object) -> Result:
        """Call `function`, which Ctrl-C interrupts at once.

        If Ctrl-C came before, in the block, its handler runs first.
        """
        self._delays = False
        try:
            self._pass_on()
            return function(*args)
        finally:
            self._delays = True

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._came = True
        self._frame = frame
        if not self._delays:
            # A second Ctrl-C waits while the exception of the first one leaves the function.
            self._delays = True
            while self._came:
                self._pass_on()
            self._delays = False

    def _pass_on(self) -> None:
        if self._came:
            # The frame leads to the caller's variables, which may hold this object.
            self._came, frame, self._frame = False, self._frame, None
            self._handler(signal.SIGINT, frame)
