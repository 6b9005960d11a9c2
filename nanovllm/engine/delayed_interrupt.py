"""Keeps Ctrl-C out of code that must not stop half-way."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class DelayedInterrupt:
    """Delays Ctrl-C until the end of a `with` block, so that what it changes stays consistent.

    Only the main thread is ever interrupted, and only by a handler that is written in Python.
    """

    def __init__(self) -> None:
        self._handler: Any = None
        self._frame: FrameType | None = None
        self._came = False

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._delay)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._came:
                self._handler(signal.SIGINT, self._frame)

    def _delay(self, signum: int, frame: FrameType | None) -> None:
        self._came, self._frame = True, frame
