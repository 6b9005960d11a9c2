"""Progress bars: live at a terminal, none in a log or with TQDM_DISABLE."""

import io
import itertools
import os
import pty
import subprocess
import sys
import termios

import pytest

from nanovllm.utils.progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_bars_are_for_terminals(monkeypatch: pytest.MonkeyPatch, kind: type[io.StringIO]) -> None:
    monkeypatch.setattr("sys.stderr", stream := kind())
    with progress_bar(total=50, shown=True, desc="Loading", delay=1) as bar:
        clock = itertools.count(getattr(bar, "start_t", 0))
        bar._time = lambda: next(clock)  # a second at each look
        for _ in range(50):
            bar.update(1)
    shown = stream.getvalue()
    if kind is Terminal:
        assert "100%" in shown.split("\r")[-1]
        assert shown.count("Loading") > 10
    else:
        assert not shown


def test_what_is_quick_or_not_wanted_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", stream := Terminal())
    with progress_bar(total=50, shown=True, delay=60) as bar:
        bar.update(50)
    assert list(progress_bar([1, 2], shown=False)) == [1, 2]
    assert not stream.getvalue()


def test_the_environment_hides_it() -> None:
    code = "from nanovllm.utils.progress import progress_bar as p; list(p([1], shown=True))"
    for value, is_shown in (("", True), ("1", False)):
        terminal, program = pty.openpty()
        termios.tcsetwinsize(program, (24, 80))
        environment = {**os.environ, "TQDM_DISABLE": value}
        subprocess.run([sys.executable, "-c", code], env=environment, stderr=program, check=True)
        os.write(program, b".")
        shown = b""
        while not shown.endswith(b"."):
            shown += os.read(terminal, 10_000)
        os.close(program)
        os.close(terminal)
        assert (b"100%" in shown) == is_shown
