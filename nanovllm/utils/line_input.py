"""Lines that someone types in a terminal, and messages of several lines.

Lines can be edited and completed, and there is a history.
"""

import contextlib
import glob
import json
import locale
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

from nanovllm.errors import InvalidRequestError
from nanovllm.utils.disk_cache import state_directory
from nanovllm.utils.terminal import check_text, complain, is_dumb, read_text, write

HISTORY_LENGTH = 1000
"""Lines of the history that a session starts with."""
_QUOTES = '"""'
Completions = Callable[[str], list[str]]
"""Returns what the last word of a line may become."""


class _Joiner:
    """Makes one text of the lines between two triple quotes, and of those that end with a
    backslash.
    """

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._quoted = False

    @property
    def is_open(self) -> bool:
        return self._quoted or bool(self._lines)

    def add(self, line: str) -> str | None:
        """Return the text that this line ends, None if more lines belong to it."""
        if not self.is_open and line.lstrip().startswith(_QUOTES):
            self._quoted, line = True, line.lstrip().removeprefix(_QUOTES)
        if self._quoted:
            is_end = line.rstrip().endswith(_QUOTES)
            line = line.rstrip().removesuffix(_QUOTES) if is_end else line
        else:  # two backslashes are text
            is_end = (len(line) - len(line.rstrip("\\"))) % 2 == 0
            line = line if is_end else line[:-1]
        self._lines.append(line)
        return self.end() if is_end else None

    def end(self) -> str:
        """Return the text so far, and begin anew."""
        text = "\n".join(self._lines)
        self._lines = []
        self._quoted = False
        return text


def joined_lines(lines: Iterable[str]) -> Iterator[str]:
    """Yield lines, those that belong together as one text."""
    joiner = _Joiner()
    for line in lines:
        if (text := joiner.add(line)) is not None:
            yield text
    if joiner.is_open:
        yield joiner.end()


def path_completions(word: str) -> list[str]:
    """Return the paths that begin with `word`; directories end with a slash."""
    found = glob.glob(glob.escape(os.path.expanduser(word)) + "*")
    return sorted(path + "/" * os.path.isdir(path) for path in found)


def typed_lines(completions: Completions = lambda line: []) -> Iterator[str]:
    """Yield what is typed at the terminal, joined as by `joined_lines`; lines that are pasted
    together come as one text.

    Ctrl-C clears the text. Ctrl-D, or Ctrl-C twice on an empty line, leaves.

    Raises:
        KeyboardInterrupt: Ctrl-C came twice on an empty line.
    """
    editor = _line_editor(completions)
    history = _History(editor)
    joiner = _Joiner()
    interrupted = False
    while True:
        try:
            line = read_text(lambda: input("... " if joiner.is_open else "> "))
        except EOFError:
            write("\n")
            return
        except KeyboardInterrupt:
            write("\n")
            empty = (editor is None or not editor.get_line_buffer()) and not joiner.is_open
            joiner.end()
            if interrupted and empty:
                raise
            interrupted = empty
            if interrupted:
                write("(Ctrl-C again, or Ctrl-D, quits.)\n")
        except InvalidRequestError as error:
            complain(str(error))
        else:
            interrupted = False
            if (text := joiner.add(line)) is not None:
                history.add(text)
                yield text


def _line_editor(completions: Completions) -> Any:
    """Return Python's readline, ready for use; None if this Python has none."""
    try:
        import readline
    except ImportError:
        return None
    if sys.flags.utf8_mode:  # Python takes UTF-8 for a locale that has none, or is not installed
        with contextlib.suppress(locale.Error):
            locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
            os.environ["LC_ALL"] = "C.UTF-8"  # readline asks there at each line
    readline.set_auto_history(False)  # _History adds the lines
    if not is_dumb():
        readline.parse_and_bind("set enable-bracketed-paste on")
    readline.parse_and_bind("set enable-active-region off")  # it would highlight pasted text
    readline.parse_and_bind("tab: complete")
    readline.set_completer_delims(" ")

    def complete(word: str, index: int) -> str | None:
        found = completions(readline.get_line_buffer()[: readline.get_endidx()])
        return found[index] if index < len(found) else None

    readline.set_completer(complete)
    return readline


class _History:
    """The lines typed in this session and in those before it.

    A file that only its owner can read keeps them, a JSON string a line: a pasted text has several
    lines. Without such a file the history is that of this session.
    """

    def __init__(self, editor: Any) -> None:
        self._editor = editor
        directory = state_directory()
        self._last = ""
        if editor is None or directory is None:
            self._editor = None
            return
        self._path = directory / "chat_history"
        with contextlib.suppress(OSError, ValueError):
            with self._open(os.O_RDONLY) as file:
                lines = file.readlines()[-HISTORY_LENGTH:]
            for line in map(json.loads, lines):
                editor.add_history(check_text("history", str(line)))

    def add(self, line: str) -> None:
        """Add a line, unless it is blank or the same as the last one."""
        if self._editor is None or not line.strip() or line == self._last:
            return
        self._last = line
        with contextlib.suppress(UnicodeEncodeError):  # a locale without these characters
            self._editor.add_history(line)
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._open(os.O_WRONLY | os.O_APPEND | os.O_CREAT) as file:
                file.write(json.dumps(line) + "\n")

    def _open(self, flags: int) -> TextIO:
        """Open the file if it is a regular file of ours, and keep others from reading it."""
        descriptor = os.open(self._path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            os.close(descriptor)
            raise OSError("not a regular file of this user")
        os.fchmod(descriptor, 0o600)
        return open(descriptor, "a" if flags & os.O_APPEND else "r", encoding="utf-8")
