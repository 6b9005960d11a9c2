"""Progress bars: live at a terminal, one line in a log, none with TQDM_DISABLE."""

import io
import itertools
import os
import subprocess
import sys

import pytest

from nanovllm.utils.progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_a_log_gets_one_line(monkeypatch: pytest.MonkeyPatch, kind: type[io.StringIO]) -> None:
    monkeypatch.setattr("sys.stderr", stream := kind())
    with progress_bar(total=50, shown=True, desc="Loading", delay=1) as bar:
        clock = itertools.count(bar.start_t)
        bar._time = lambda: next(clock)  # a second at each look
        for _ in range(50):
            bar.update(1)
    assert stream.getvalue().count("\n") == 1
    assert "100%" in stream.getvalue().split("\r")[-1]
    is_live = kind is Terminal
    assert (stream.getvalue().count("Loading") > 10) == is_live
    assert (stream.getvalue().count("Loading") <= 2) == (not is_live)


def test_what_is_quick_or_not_wanted_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", stream := io.StringIO())
    with progress_bar(total=50, shown=True, delay=60) as bar:
        bar.update(50)
    assert list(progress_bar([1, 2], shown=False)) == [1, 2]
    assert not stream.getvalue()


def test_the_environment_hides_it() -> None:
    code = "from nanovllm.utils.progress import progress_bar as p; list(p([1], shown=True))"
    command = [sys.executable, "-c", code]
    for value, is_shown in (("", True), ("1", False)):
        environment = {**os.environ, "TQDM_DISABLE": value}
        done = subprocess.run(command, env=environment, capture_output=True, check=True)
        assert (b"100%" in done.stderr) == is_shown
