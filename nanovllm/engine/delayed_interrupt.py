"""Keeps Ctrl-C out of code that must not stop half-way."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, TypeVar

Result = TypeVar("Result")


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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            self._pass_on()

    def interruptible(self, function: Callable[..., Result], *args: object) -> Result:
        """Call a function of the block that Ctrl-C may interrupt at once."""
        self._delays = False
        try:
            self._pass_on()
            return function(*args)
        finally:
            self._delays = True

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._came, self._frame = True, frame
        if not self._delays:
            self._delays = True  # also while the exception of the handler ends the function
            self._pass_on()
            self._delays = False

    def _pass_on(self) -> None:
        if self._came:
            self._came = False
            self._handler(signal.SIGINT, self._frame)
