"""`nanovllm learn`: shows, asks, checks, remembers. With lesson 4, which needs no torch."""

import io
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nanovllm.apps.cli.main import main
from nanovllm.apps.learn.course import LESSONS, remember
from nanovllm.apps.learn.grade import grade, main as grade_main
from tests.helpers import ROOT, environment

LESSON = LESSONS[3]
STATE = "state/nanovllm/learn.json"


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_it_shows_asks_hands_out_and_remembers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("5\n 4 \n"))
    assert main(["learn", "4"]) == 0
    printed = capsys.readouterr().out
    assert LESSON.text.rstrip().splitlines()[-1] in printed
    assert "printed what the page shows" in printed
    assert printed.count("No. Try again.") == 1
    assert f"Right, 4: {LESSON.reason}" in printed
    assert Path("exercise_04.py").read_text() == LESSON.exercise.read_text()
    assert json.loads(Path(STATE).read_text()) == {"answered": [4], "solved": []}
    assert main(["learn"]) == 0
    assert "4  Paged blocks                    question answered\n" in capsys.readouterr().out


def test_without_an_answer_nothing_is_remembered_and_no_file_overwritten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("exercise_04.py").write_text("mine")
    monkeypatch.setattr("sys.stdin", None)
    assert main(["learn", "4"]) == 0
    assert "is in this directory already" in capsys.readouterr().out
    assert Path("exercise_04.py").read_text() == "mine"
    assert not Path(STATE).exists()


def test_a_solution_is_solved_and_the_last_one_leads_to_the_engine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("exercise_04.py").write_text(LESSON.exercise.read_text())
    assert main(["learn", "check", "4"]) == 1
    assert not Path(STATE).exists()
    assert main(["learn", "solution", "4"]) == 0
    Path("exercise_04.py").write_text(capsys.readouterr().out)
    Path(STATE).parent.mkdir(parents=True)
    others = [lesson.number for lesson in LESSONS if lesson is not LESSON]
    Path(STATE).write_text(json.dumps({"solved": others}))
    assert main(["learn", "check", "4"]) == 0
    printed = capsys.readouterr().out
    assert "exercise_04.py: solved.\n" in printed
    [path] = [line for line in printed.splitlines() if line.endswith("mini.py")]
    assert Path(path).samefile(ROOT / "docs" / "mini.py")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("{exercise}", "allocate is not written yet"),
        (
            "def allocate(*_): return [1]",
            "not yet.\ntable [1], free [4, 0, 2], 6 tokens: slots",
        ),
        ("def allocate(*_): assert False", "line 1, in allocate"),
        ("def allocate(", "SyntaxError"),
        ("allocate = None", "the file has no function allocate"),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("{exercise}\ndef check(*_): pass", "allocate is not written yet"),
    ],
)
def test_what_is_wrong_is_said(
    code: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: `check` has another one for it."""
    Path("mine.py").write_text(code.replace("{exercise}", LESSON.exercise.read_text()))
    monkeypatch.setattr(sys, "argv", ["grade", str(LESSON.exercise), "mine.py"])
    assert grade_main() == 1
    assert words in capsys.readouterr().out


def test_a_loop_without_end_is_stopped(capfd: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text("while True: pass")
    assert not grade(LESSON, Path("mine.py"), patience=0.5)
    assert "mine.py: stopped after 0.5 seconds" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["9" * 5000], "LESSON must be a number from 1 to"),
        (["two"], "LESSON must be a number from 1 to"),
        (["test", "1"], "learn takes a LESSON, check LESSON [FILE], or solution LESSON"),
        (["check", "4"], "there is no file 'exercise_04.py' here: nanovllm learn 4 writes it"),
    ],
)
def test_bad_arguments(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["learn", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[]", '{"solved": ["x"]}', "\xff"])
def test_damaged_progress_counts_as_none(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(STATE).parent.mkdir(parents=True)
    Path(STATE).write_bytes(text.encode("latin-1"))
    assert main(["learn"]) == 0
    assert "Go on with: nanovllm learn 1\n" in capsys.readouterr().out


def test_progress_that_cannot_be_kept_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    Path("state").write_text("a file in the place of a directory")
    remember("solved", 1)
    assert "nanovllm: progress is not kept in" in capsys.readouterr().err


def test_at_a_terminal_enter_goes_on_and_ctrl_c_leaves() -> None:
    reader, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "nanovllm", "learn", "4"],
        env=environment(PYTHONPATH=str(ROOT), TERM="xterm"),
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    try:
        shown = b""
        for _ in range(2):
            while not shown.endswith(b"(Enter goes on) "):
                shown += os.read(reader, 4096)
            shown += b"\n"
            os.write(reader, b"\n")
        assert b"\x1b[" in shown or b"## " in shown  # by rich, or plain
        assert b"![" not in shown
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    finally:
        process.kill()
        os.close(reader)
