"""How commands of many threads run on one engine: their results, their errors, and signals."""

import logging
import signal
import threading

# That of `signal` looks for an enum with each value: 60 microseconds for all signals, not 2.
from _signal import getsignal  # type: ignore[import-not-found]
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType
from typing import Any, TypeVar

from nanovllm.errors import log_failure

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
_SIGNALS = tuple(map(int, signal.valid_signals()))


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
    """Delays the handlers of signals until the end of a `with` block, so that what it changes stays
    consistent: each may raise, as that of Ctrl-C does, or one that ends a call after some time.

    Only the main thread runs them, and only those that are written in Python matter.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._came: list[tuple[int, FrameType | None]] = []
        self._delays = True

    def __enter__(self) -> "DelayedInterrupt":
        if threading.current_thread() is threading.main_thread():
            handlers = ((signum, getsignal(signum)) for signum in _SIGNALS)
            self._handlers = {signum: found for signum, found in handlers if callable(found)}
            try:
                for signum in self._handlers:
                    signal.signal(signum, self._handle)
            except BaseException:  # of a handler that is not delayed yet
                self.__exit__()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._restore()
        except BaseException:  # of a handler that is delayed no more
            self._restore()
            raise
        finally:
            self._delays = False  # for code that keeps `_handle` and sets it again
            self._pass_on()

    def _restore(self) -> None:
        for signum, handler in self._handlers.items():
            if getsignal(signum) == self._handle:  # else the block has set another handler
                signal.signal(signum, handler)

    def interruptible(self, function: Callable[..., Result], *args: object) -> Result:
        """Call `function`, which signals interrupt at once.

        If one came before, in the block, its handler runs first.
        """
        self._delays = False
        try:
            self._pass_on()
            return function(*args)
        finally:
            self._delays = True

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._came.append((signum, frame))
        if not self._delays:
            # A second one waits while the exception of the first one leaves the function.
            self._delays = True
            while self._came:
                self._pass_on()
            self._delays = False

    def _pass_on(self) -> None:
        if self._came:
            # The frame leads to the caller's variables, which may hold this object.
            signum, frame = self._came.pop(0)
            try:
                self._handlers[signum](signum, frame)
            finally:  # one that raises keeps no other from being run
                self._pass_on()
