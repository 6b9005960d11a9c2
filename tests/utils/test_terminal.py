"""`nanovllm chat` at a terminal: a session over a pty, compared with a stored transcript.

The pty stands for the terminal window, and pyte draws what the program writes.
"""

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import stat
import struct
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pyte
import pytest

from nanovllm import demo_model
from nanovllm.utils.terminal import joined_lines
from tests.glossary import ANSWER_TO, QUESTION
from tests.helpers import environment

TRANSCRIPT = Path(__file__).with_name("terminal_session.txt")
PROMPT = b"\x1b[?2004h"
"""prompt_toolkit turns bracketed paste on with each prompt."""
UP = b"\x1b[A"
CTRL_C = b"\x03"
CTRL_D = b"\x04"
TIMEOUT = 60.0
"""Seconds to wait for a text. Only a failing test, or a very busy machine, waits so long."""

CHAT = """
import sys, time, types
from nanovllm.llm import LLM
from nanovllm.apps.cli import main as cli

stream = LLM.stream

def waiting(llm, prompt, params):
    text = prompt.text
    if "Wait" not in text:
        yield from stream(llm, prompt, params)
        return
    lines = text[text.index("Wait"):].partition("<|im_end|>")[0].splitlines()
    time.sleep(0.3)  # the spinner turns
    text = f"I wait ({len(lines)} lines)"
    yield types.SimpleNamespace(text=text, finish_reason=None, token_ids=[])
    while True:  # until Ctrl-C
        time.sleep(0.01)
        yield types.SimpleNamespace(text="", finish_reason=None, token_ids=[])

LLM.stream = waiting
sys.exit(cli.main(sys.argv[1:]))
"""
"""The chat, but a message with "Wait" is answered until Ctrl-C comes."""

LINES = """
import sys
from nanovllm.utils.terminal import path_completions, typed_lines

def completions(line):
    return [w for w in ("/save", "/set", "/system") if w.startswith(line)] or path_completions(
        line.partition(" ")[2]
    )

try:
    for line in typed_lines(completions):
        print(f"got {line!r}")
except KeyboardInterrupt:
    sys.exit(130)
"""
"""The lines that a chat would read."""


class Terminal:
    """A program that runs at a pty."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        self.raw = b""
        self._seen = 0
        self.pid, self._pty = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, [sys.executable, *arguments], environment(**variables))
        self.resize(60, 200)

    def resize(self, rows: int, columns: int) -> None:
        """Resize the window; the system sends SIGWINCH."""
        fcntl.ioctl(self._pty, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))

    def send(self, keys: bytes) -> None:
        os.write(self._pty, keys)

    def expect(self, *texts: bytes) -> None:
        """Read until these texts have come, each after the one before it."""
        end = time.monotonic() + TIMEOUT
        for text in texts:
            while (found := self.raw.find(text, self._seen)) < 0:
                assert time.monotonic() < end, f"{text!r} did not come; {self.raw!r} did"
                assert self._read(), f"the program ended without {text!r}; {self.raw!r} came"
            self._seen = found + len(text)

    def expect_line(self, line: str) -> None:
        """Read until the last line on the screen is this one."""
        end = time.monotonic() + TIMEOUT
        while drawn(self.raw).splitlines()[-1] != line:
            assert time.monotonic() < end, f"{line!r} did not come; {self.raw!r} did"
            assert self._read(), f"the program ended without {line!r}; {self.raw!r} came"

    def end(self) -> int:
        """Read to the program's end and return its exit status."""
        end = time.monotonic() + TIMEOUT
        while self._read():
            assert time.monotonic() < end, f"the program did not end; {self.raw!r} came"
        os.close(self._pty)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        """End the program if it still runs."""
        with contextlib.suppress(OSError):
            if os.waitpid(self.pid, os.WNOHANG) == (0, 0):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                os.close(self._pty)

    def _read(self) -> bool:
        """Wait a second for output; return False if the program has ended."""
        if select.select([self._pty], [], [], 1.0)[0]:
            try:
                piece = os.read(self._pty, 65536)
            except OSError:
                return False
            self.raw += piece
            return bool(piece)
        return True


@pytest.fixture
def terminals(tmp_path: Path) -> Iterator[list[Terminal]]:
    started: list[Terminal] = []
    yield started
    for terminal in started:
        terminal.kill()


def start(terminals: list[Terminal], home: Path, *arguments: str, **variables: str) -> Terminal:
    fixed = {"PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm", "PYTHONIOENCODING": "utf-8"}
    fixed |= {"XDG_STATE_HOME": str(home), "LC_ALL": "C.UTF-8"}
    terminals.append(Terminal(*arguments, **fixed | variables))
    return terminals[-1]


def drawn(raw: bytes) -> str:
    """Return the lines that a wide terminal shows after it got `raw`."""
    screen = pyte.Screen(200, 60)
    pyte.ByteStream(screen).feed(raw)
    return "".join(f"{line.rstrip()}\n" for line in screen.display).rstrip() + "\n"


@pytest.mark.long
def test_session_is_the_stored_one(terminals: list[Terminal], tmp_path: Path) -> None:
    options = ["--num-kvcache-blocks", "64", "--max-model-len", "512", "--enforce-eager"]
    options += ["--temperature", "0"]
    saved = tmp_path / "chat.json"
    chat = start(
        terminals, tmp_path, "-c", CHAT, "chat", demo_model.MODEL, *options, "--temperature", "0"
    )
    answer = ANSWER_TO[QUESTION]
    chat.expect(PROMPT)
    chat.send(b"\x1b[200~Wait for me,\rplease.\x1b[201~")
    chat.expect_line("... please.")
    chat.send(b"\r")
    chat.expect(b"I wait (2 lines)")
    chat.send(CTRL_C)
    chat.expect(PROMPT)
    chat.send(QUESTION[:7].encode())
    chat.expect_line(f"> {QUESTION[:7]}")
    chat.resize(50, 200)
    chat.send(QUESTION[7:].encode() + b"\r")
    chat.expect(answer.encode(), PROMPT)
    chat.send(b"/rest\r")
    chat.expect(PROMPT)
    chat.send(b"/reset\r")
    chat.expect(PROMPT)
    chat.send(UP + UP + UP)
    chat.expect_line(f"> {QUESTION}")
    chat.send(b"\r")
    chat.expect(answer.encode(), PROMPT)
    chat.send(b"not sent")
    chat.expect_line("> not sent")
    chat.send(CTRL_C)
    chat.expect(PROMPT)
    chat.send(CTRL_C)
    chat.expect(PROMPT)
    chat.send(f"/save {saved}\r".encode())
    chat.expect(PROMPT)
    chat.send(CTRL_D)
    assert chat.end() == 0
    assert re.search(rb"\x1b\[2K[|/\\-]", chat.raw), "no spinner"
    assert not re.search(rb"\x1b\[[\d;]*[34]\d[\d;]*m", chat.raw), "a colour"
    speeds = r"\(\d+ tokens, the first after \d+\.\d s(, \d+ tokens/s)?\)"
    shown, count = re.subn(speeds, "(SPEED)", drawn(chat.raw).replace(str(saved), "FILE"))
    assert count == 2
    assert shown.rstrip() + "\n" == TRANSCRIPT.read_text(encoding="utf-8")
    assert json.loads(saved.read_text(encoding="utf-8")) == [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": answer},
    ]


def test_history_outlives_the_session(terminals: list[Terminal], tmp_path: Path) -> None:
    history = tmp_path / ".local/state/nanovllm/chat_history"
    for session in (
        {b"\x1b[200~one\rtwo\x1b[201~\r": rb"got 'one\ntwo'"},
        {
            UP + b" three\r": rb"got 'one\ntwo three'",
            UP + UP + UP + b"\r": rb"got 'one\ntwo'",  # the second one moves to the first line
        },
    ):
        typed = start(terminals, tmp_path, "-c", LINES, HOME=str(tmp_path), XDG_STATE_HOME="")
        typed.expect(PROMPT)
        for keys, got in session.items():
            typed.send(keys)
            typed.expect(got, PROMPT)
        typed.send(CTRL_D)
        assert typed.end() == 0
        assert stat.S_IMODE(history.stat().st_mode) == 0o600
        history.chmod(0o644)  # the next session mends it
    assert history.read_text().count("\n+one\n+two") == 3


def test_several_lines_and_completion(terminals: list[Terminal], tmp_path: Path) -> None:
    """Three quotes, backslashes, and the tab key; the history has a message as a whole."""
    (tmp_path / "a_file").write_text("")
    (tmp_path / "a_folder").mkdir()
    typed = start(terminals, tmp_path, "-c", LINES)
    for keys, got in (
        (b'"""one\r two\rthree"""\r', rb"got 'one\n two\nthree'"),
        (b"five\\\rsix\r", rb"got 'five\nsix'"),
        (UP + b"!\r", rb"got 'five\nsix!'"),
        (b"/sy\t\r", b"got '/system'"),
        (f"/save {tmp_path}/a_fi\t\r".encode(), f"got '/save {tmp_path}/a_file'".encode()),
        (f"/save {tmp_path}/a_fo\t\r".encode(), b"a_folder/"),
        (b"no \t completion\r", b"got 'no  completion'"),
    ):
        typed.expect(PROMPT)
        typed.send(keys)
        typed.expect(got)
    typed.expect(PROMPT)
    typed.send(b'"""half\r')
    typed.expect_line("...")
    typed.send(CTRL_C)
    typed.expect(PROMPT)
    typed.send(b"whole\r")
    typed.expect(b"got 'whole'", PROMPT)
    typed.send(CTRL_D)
    assert typed.end() == 0


def test_unusable_history_does_no_harm(terminals: list[Terminal], tmp_path: Path) -> None:
    """The file is a link to one of somebody else: nothing is read from it or written to it."""
    target = tmp_path / "theirs"
    target.write_text("\n+planted\n")
    history = tmp_path / "nanovllm" / "chat_history"
    history.parent.mkdir()
    history.symlink_to(target)
    typed = start(terminals, tmp_path, "-c", LINES)
    typed.expect(PROMPT)
    typed.send(UP + b"mine\r")
    typed.expect(b"got 'mine'", PROMPT)
    typed.send(UP + b"\r")
    typed.expect(b"got 'mine'", PROMPT)
    typed.send(CTRL_C)
    typed.expect(b"Ctrl-C again", PROMPT)
    typed.send(CTRL_C)
    assert typed.end() == 130
    assert target.read_text() == "\n+planted\n"


def test_terminal_without_features(terminals: list[Terminal], tmp_path: Path) -> None:
    """TERM=dumb: no escape sequence; a byte that is not text is named and the session goes on."""
    variables = {"TERM": "dumb", "LC_ALL": "C", "PYTHONUTF8": "0"}
    typed = start(terminals, tmp_path, "-c", LINES, **variables)
    typed.expect(b"> ")
    typed.send(b"caf\xe9\r")
    typed.expect(b"not UTF-8 text: it has byte 0xe9", b"> ")
    typed.send("thé\r".encode())
    typed.expect("got 'thé'".encode(), b"> ")
    typed.send(CTRL_D)
    assert typed.end() == 0
    assert b"\x1b" not in typed.raw


def test_lines_of_a_pipe_are_joined() -> None:
    lines = [
        '"""one',
        " two",
        'three"""',
        '"""four"""',
        "five\\",
        "six",
        "C:\\\\",
        "a",
        '"""half',
        "b",
    ]
    expected = ["one\n two\nthree", "four", "five\nsix", "C:\\\\", "a", "half\nb"]
    assert [*joined_lines(lines)] == expected
    assert [*joined_lines(["end\\"])] == ["end"]
