"""Messages that someone types in a terminal, or that come through a pipe.

At a terminal prompt_toolkit edits and completes them, and keeps a history.
"""

import glob
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from nanovllm.errors import InvalidRequestError
from nanovllm.utils.disk_cache import state_directory
from nanovllm.utils.terminal import complain, is_dumb, read_text, write

if TYPE_CHECKING:
    from prompt_toolkit.history import History

_QUOTES = '"""'
Completions = Callable[[str], list[str]]
"""Returns what the last word of a line may become."""


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
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(path, flags, 0o600)
    except OSError:
        return InMemoryHistory()
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            return InMemoryHistory()
        os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)
    return FileHistory(path)
