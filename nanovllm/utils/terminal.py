"""The standard streams of the command line: lines in, text out, and what a terminal adds.

It writes no colours, so NO_COLOR needs no rule: rich, which `explain` uses, has its own.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

from nanovllm.errors import InvalidRequestError, NanoVLLMError

_VISIBLE = {
    code: f"\\x{code:02x}" for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t"
}
"""Control characters, written as escapes: a model's text must not control the terminal."""


class OutputError(Exception):
    """Standard output cannot be written. `status` is the exit status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def prepare_streams() -> None:
    """Make the standard streams safe to use, whatever the caller closed.

    A character that the output's encoding lacks is written as an escape.

    Raises:
        OutputError: standard output is closed.
    """
    for descriptor in range(3):  # or the next file opened would become a standard stream
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (open until the process ends)
    if sys.stdout is None:
        raise OutputError("standard output is closed", 1)
    reconfigure = getattr(sys.stdout, "reconfigure", None)  # not if a test replaced it
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")


def is_interactive() -> bool:
    """Return whether somebody types and reads at a terminal."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


def write(text: str, *, is_styled: bool = False) -> None:
    """Write text to standard output at once.

    Args:
        is_styled: whether its control characters are ours, and may reach a terminal.

    Raises:
        OutputError: it cannot be written.
    """
    try:
        is_shown = sys.stdout.isatty() and not is_styled
        sys.stdout.write(text.translate(_VISIBLE) if is_shown else text)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe has ended, such as `| head`
        raise OutputError("", 141) from None
    except OSError as error:
        raise OutputError(f"cannot write the output: {error.strerror}", 1) from None


def write_stream(pieces: Iterable[str]) -> str:
    """Write pieces of text as they come, then a newline, and return the whole text.

    Writes nothing if an error comes before any text.
    """
    text = ""
    is_refused = False
    try:
        for piece in pieces:
            write(piece)
            text += piece
    except NanoVLLMError:
        is_refused = not text
        raise
    finally:
        if not is_refused:
            write("\n")
    return text


def complain(message: str) -> None:
    """Write a message as one line to standard error, if that can be written."""
    try:
        sys.stderr.write(" ".join(message.splitlines()).translate(_VISIBLE) + "\n")
        sys.stderr.flush()
    except OSError:
        abandon(sys.stderr)


def note(message: str) -> None:
    """Write a line to standard error if somebody reads it there; a log needs no such lines."""
    if sys.stderr.isatty():
        complain(message)


def abandon(stream: TextIO | None) -> None:
    """Drop what a stream still holds: Python would try to write it at exit, and complain."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())  # type: ignore[union-attr]
        os.close(nowhere)


@contextlib.contextmanager
def spinner() -> Iterator[None]:
    """Show at a terminal that the program works, until the block ends."""
    if not is_interactive() or is_dumb():
        yield
        return
    from rich.console import Console
    from rich.live import Live
    from rich.spinner import Spinner

    console = Console(color_system=None)
    with Live(Spinner("line"), console=console, transient=True, redirect_stderr=False):
        yield


@contextlib.contextmanager
def noted_interrupts() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether Ctrl-C came.

    So the first Ctrl-C ends an answer between two steps of the engine. The second one raises
    KeyboardInterrupt wherever the program is.
    """
    came = False

    def note(*_: Any) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGINT, before)


def check_text(what: str, text: str) -> str:
    """Return `text`, in which Python wrote bytes as lone surrogates, as the UTF-8 that it is.

    Python does so with each byte that is not UTF-8, and in an ASCII locale with all above 127.

    Raises:
        InvalidRequestError: it is not UTF-8.
    """
    try:
        return text.encode(errors="surrogateescape").decode()
    except UnicodeDecodeError as error:
        wrong = error.object[error.start]
        raise InvalidRequestError(f"{what} is not UTF-8 text: it has byte {wrong:#x}") from None
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{what} is no Unicode text: {error}") from None


def piped_lines() -> Iterator[str]:
    """Yield the lines of standard input.

    Raises:
        InvalidRequestError: it is closed, cannot be read, or holds no text.
    """
    if sys.stdin is None:
        raise InvalidRequestError("standard input is closed")
    while line := read_text(sys.stdin.readline):
        yield line.rstrip("\n")


def read_text(read: Callable[[], str]) -> str:
    """Return `read()`; raise InvalidRequestError if standard input has no text to read."""
    try:
        return check_text("standard input", read())
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"standard input is not {error.encoding.upper()} text: "
            f"it has byte {error.object[error.start]:#x}"
        ) from None
    except OSError as error:
        raise InvalidRequestError(f"standard input cannot be read: {error.strerror}") from None


def is_dumb() -> bool:
    """Return whether the terminal knows no escape sequences."""
    return os.environ.get("TERM", "dumb") == "dumb"
