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
from nanovllm.apps.learn.course import LESSONS, remember_answered
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
    assert Path("exercise_04.py").read_text(encoding="utf-8") == LESSON.exercise.read_text()
    assert json.loads(Path(STATE).read_text(encoding="utf-8")) == {"answered": [4]}
    assert main(["learn"]) == 0
    assert "4  Paged blocks                    question answered\n" in capsys.readouterr().out


def test_without_an_answer_nothing_is_remembered_and_no_file_overwritten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("exercise_04.py").write_text("mine", encoding="utf-8")
    monkeypatch.setattr("sys.stdin", None)
    assert main(["learn", "4"]) == 0
    assert "is in this directory already" in capsys.readouterr().out
    assert Path("exercise_04.py").read_text(encoding="utf-8") == "mine"
    assert not Path(STATE).exists()


def test_a_solution_solves_the_exercise_and_the_course_leads_to_the_engine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["learn", "solution", "4"]) == 0
    assert capsys.readouterr().out == LESSON.solution.read_text()
    Path(STATE).parent.mkdir(parents=True)
    Path(STATE).write_text(
        json.dumps({"answered": [lesson.number for lesson in LESSONS]}), encoding="utf-8"
    )
    assert main(["learn"]) == 0
    *_, path = capsys.readouterr().out.splitlines()
    assert Path(path).samefile(ROOT / "docs" / "mini.py")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["9" * 5000], "LESSON must be a number from 1 to"),
        (["two"], "LESSON must be a number from 1 to"),
        (["test", "1"], "learn takes a LESSON, or solution LESSON, got 'test 1'"),
    ],
)
def test_bad_arguments(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["learn", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[]", '{"answered": ["x"]}', "\xff"])
def test_damaged_progress_counts_as_none(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(STATE).parent.mkdir(parents=True)
    Path(STATE).write_bytes(text.encode("latin-1"))
    assert main(["learn"]) == 0
    assert "Go on with: nanovllm learn 1\n" in capsys.readouterr().out


def test_progress_that_cannot_be_kept_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    Path("state").write_text("a file in the place of a directory", encoding="utf-8")
    remember_answered(1)
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
