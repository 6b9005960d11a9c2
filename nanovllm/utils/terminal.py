"""The standard streams of the command line: text out, lines and messages in.

It writes no colours, so NO_COLOR needs no rule: rich, which `explain` uses, has its own. At a
terminal prompt_toolkit edits and completes messages, and keeps a history.
"""

import contextlib
import glob
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

from nanovllm.errors import InvalidRequestError, NanoVLLMError
from nanovllm.utils.disk_cache import open_ours, state_directory

if TYPE_CHECKING:
    from prompt_toolkit.history import History

_VISIBLE = {
    code: f"\\x{code:02x}" for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t"
}
"""Control characters, written as escapes: a model's text must not control the terminal."""
_QUOTES = '"""'
Completions = Callable[[str], list[str]]
"""Returns what the last word of a line may become."""


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
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (open until the process ends)
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
    return os.environ.get("TERM", "" if sys.platform == "win32" else "dumb") == "dumb"


def message_of(text: str, *, is_all: bool = False) -> str | None:
    """Return the message that lines are; None if more belong to it.

    Triple quotes stand around a message of several lines, or a backslash ends each but the last;
    two backslashes are text.

    Args:
        is_all: no more lines come.
    """
    if text.lstrip().startswith(_QUOTES):
        quoted = text.lstrip().removeprefix(_QUOTES)
        is_whole = quoted.rstrip().endswith(_QUOTES)
        return quoted.rstrip().removesuffix(_QUOTES) if is_whole or is_all else None
    if (len(text) - len(text.rstrip("\\"))) % 2:
        if not is_all:
            return None
        text = text[:-1]
    return re.sub(r"(?<!\\)((?:\\\\)*)\\\n", r"\1\n", text)


def joined_lines(lines: Iterable[str]) -> Iterator[str]:
    """Yield the messages that lines are."""
    pending: list[str] = []
    for line in lines:
        pending.append(line)
        if (message := message_of("\n".join(pending))) is not None:
            pending = []
            yield message
    if pending:
        yield message_of("\n".join(pending), is_all=True) or ""


def path_completions(word: str) -> list[str]:
    """Return the paths that begin with `word`; directories end with a slash."""
    found = glob.glob(glob.escape(os.path.expanduser(word)) + "*")
    return sorted(path + "/" * os.path.isdir(path) for path in found)


def typed_lines(completions: Completions = lambda line: []) -> Iterator[str]:
    """Yield the messages that are typed at the terminal; lines that are pasted together are one.

    Ctrl-C clears the text. Ctrl-D, or Ctrl-C twice on an empty line, leaves.

    Raises:
        KeyboardInterrupt: Ctrl-C came twice on an empty line.
    """
    read, typed = (_plain_lines, str) if is_dumb() else _edited(completions)
    interrupted = False
    while True:
        try:
            text = read_text(read)
        except EOFError:
            write("\n")
            return
        except KeyboardInterrupt:
            if interrupted and not typed():
                raise
            interrupted = not typed()
            if interrupted:
                write("(Ctrl-C again, or Ctrl-D, quits.)\n")
        except InvalidRequestError as error:
            complain(str(error))
        else:
            interrupted = False
            yield message_of(text, is_all=True) or ""


def _plain_lines() -> str:
    """Read a message from a terminal that knows no escape sequences."""
    text = input("> ")
    while message_of(text) is None:
        text += "\n" + input("... ")
    return text


def _edited(completions: Completions) -> tuple[Callable[[], str], Callable[[], str]]:
    """Return what lets someone edit a message, and what returns the text of the last one."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion
    from prompt_toolkit.document import Document
    from prompt_toolkit.filters import Condition
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.output import ColorDepth
    from prompt_toolkit.shortcuts import CompleteStyle

    class Words(Completer):
        def get_completions(self, document: Document, event: CompleteEvent) -> Iterator[Completion]:
            line = document.text_before_cursor
            for word in completions(line):
                yield Completion(word, -len(line.rpartition(" ")[2]))

    keys = KeyBindings()

    @keys.add("enter", filter=Condition(lambda: message_of(session.default_buffer.text) is None))
    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(
        "> ",
        key_bindings=keys,
        prompt_continuation="... ",
        completer=Words(),
        complete_style=CompleteStyle.READLINE_LIKE,
        complete_while_typing=False,
        color_depth=ColorDepth.DEPTH_1_BIT,
        history=_history(),
    )
    return session.prompt, lambda: session.default_buffer.text


def _history() -> "History":
    """Return the messages of earlier sessions, in a file that only its owner can read.

    It is in memory if the file cannot be used, or is no regular file of this user.
    """
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    directory = state_directory()
    try:
        assert directory is not None
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = directory / "chat_history"
        if not os.path.lexists(path):
            path.touch(mode=0o600)
        descriptor = open_ours(path)
        if hasattr(os, "fchmod"):
            os.fchmod(descriptor, 0o600)
        os.close(descriptor)
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)
