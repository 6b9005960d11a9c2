"""The course: pages show what their lessons print, and exercises fail until they are solved."""

import contextlib
import importlib.util
import inspect
import io
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nanovllm.apps.learn.course import LESSONS, Lesson
from tests.helpers import ROOT, environment

COURSE = ROOT / "docs" / "course"
PAGES = [pytest.param(lesson, id=str(lesson.number)) for lesson in LESSONS]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_lessons_are_numbered_and_listed() -> None:
    assert [lesson.number for lesson in LESSONS] == list(range(1, len(LESSONS) + 1))
    folders = sorted(path.name for path in COURSE.iterdir() if path.is_dir())
    assert [lesson.folder.name for lesson in LESSONS] == folders
    index = (COURSE / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[(\d+)\. (.+)\]\((\w+)/README.md\) \|", index, re.MULTILINE)
    assert listed == [(str(lesson.number), lesson.title, lesson.folder.name) for lesson in LESSONS]


@pytest.mark.parametrize("lesson", PAGES)
def test_a_page_shows_what_its_lesson_prints(lesson: Lesson) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        load(lesson.script).main()
    assert printed.getvalue() == lesson.output
    source = lesson.script.read_text(encoding="utf-8")
    assert len(source.splitlines()) < 100
    for block in re.findall(r"^```python\n(.*?)^```", lesson.page, re.DOTALL | re.MULTILINE):
        assert any(textwrap.indent(block, " " * depth) in source for depth in (0, 4, 8)), block


@pytest.mark.parametrize("lesson", PAGES)
def test_a_page_has_a_question_and_links_to_the_next(lesson: Lesson) -> None:
    assert lesson.question
    for right in ("{}", " {} ", "{} blocks", "It is {}."):
        assert lesson.is_right(right.format(lesson.answer))
    for wrong in ("", "I do not know", "-", "1{}", "{} or 3", "{}5"):
        assert not lesson.is_right(wrong.format(lesson.answer))
    assert f"`python {lesson.exercise.name}`" in lesson.page
    following = LESSONS[lesson.number : lesson.number + 1]
    target = f"../{following[0].folder.name}/README.md" if following else "../../mini.py"
    assert "\nNext: [" in lesson.page
    assert lesson.page.rstrip().endswith(f"({target}).")


@pytest.mark.parametrize("lesson", PAGES)
def test_an_exercise_fails_before_and_passes_after(lesson: Lesson) -> None:
    exercise = load(lesson.exercise)
    check = exercise.check
    (name,) = inspect.signature(check).parameters  # of the function to write
    with pytest.raises(NotImplementedError):
        check(getattr(exercise, name))
    with pytest.raises(AssertionError):
        check(nothing)
    check(getattr(load(lesson.solution), name))
    assert len(lesson.exercise.read_text(encoding="utf-8").splitlines()) < 100


def nothing(*arguments: Any) -> None:
    """Solve no exercise."""


def test_files_run_as_the_pages_say() -> None:
    """Without torch, so in a moment: the others run in this process."""
    lesson = LESSONS[3]
    for file, code, words in ((lesson.script, 0, lesson.output), (lesson.exercise, 1, "")):
        done = subprocess.run(
            [sys.executable, str(file)],
            env=environment(PYTHONPATH=str(ROOT)),
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout) == (code, words), done.stderr
