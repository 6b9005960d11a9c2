"""Shows a lesson in the terminal, runs its script and asks its question."""

import os
import re
import subprocess
import sys
from pathlib import Path

from nanovllm.apps.learn.course import Lesson, remember_answered
from nanovllm.errors import ConfigError
from nanovllm.utils.terminal import is_dumb, is_interactive, read_text, spinner, write

_IMAGE = re.compile(r"^!\[.*?\]\(.*?\)\n\n", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\([^)\s]+\)")
_SECTION = re.compile(r"^(?=## )", re.MULTILINE)


def show(lesson: Lesson) -> None:
    """Show the page, run the script, ask the question and hand out the exercise."""
    for number, section in enumerate(_SECTION.split(lesson.text)):
        if number:
            _pause()
        _write_markdown(section)
    _pause()
    _run(lesson)
    _ask(lesson)
    _write_markdown(lesson.task)
    _hand_out(lesson)


def _pause() -> None:
    """Wait until the reader presses Enter."""
    if is_interactive():
        write("(Enter goes on) ")
        _line()
        write("\n")


def _line() -> str | None:
    """Return a line from standard input without its end; None if there is none any more."""
    if sys.stdin is None:
        return None
    return read_text(sys.stdin.readline) or None


def _write_markdown(text: str) -> None:
    """Write Markdown: with colours at a terminal, else as it is."""
    text = _LINK.sub(r"\1", _IMAGE.sub("", text)).rstrip() + "\n\n"
    if not sys.stdout.isatty() or is_dumb():
        write(text)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    console.print(Markdown(text))
    console.print()


def _run(lesson: Lesson) -> None:
    """Run the lesson's script, and say whether it printed what the page shows."""
    name = lesson.script.name
    paths = [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]  # this nanovllm
    with spinner():
        done = subprocess.run(
            [sys.executable, str(lesson.script)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        write(f"{name} was run on this machine just now, and failed: {last}\n\n")
    elif done.stdout == lesson.output:
        write(f"{name} was run on this machine just now, and printed what the page shows.\n\n")
    else:
        write(f"{name} was run on this machine just now, and printed:\n\n{done.stdout}\n")


def _ask(lesson: Lesson) -> None:
    """Ask until the answer is right, or the reader skips the question."""
    _write_markdown(f"## Question\n\n{lesson.question}")
    while True:
        if is_interactive():
            write("(a number; Enter alone skips) > ")
        answer = _line()
        if answer is None or not answer.strip():
            write("Not answered. The question comes again with the lesson.\n\n")
            return
        if lesson.is_right(answer):
            break
        write("No. Try again.\n")
    remember_answered(lesson.number)
    _write_markdown(f"Right, {lesson.answer}: {lesson.reason}")


def _hand_out(lesson: Lesson) -> None:
    """Copy the exercise into the current directory, unless it is there.

    Raises:
        ConfigError: it cannot be written.
    """
    target = Path(lesson.exercise.name)
    test = f"python {target}"
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(lesson.exercise.read_text(encoding="utf-8"))
    except FileExistsError:
        write(f"{target} is in this directory already. To test it: {test}\n")
    except OSError as error:
        raise ConfigError(
            f"{target} cannot be written here: {error.strerror}; go to a directory of yours"
        ) from None
    else:
        write(f"Wrote {target}. Edit it, then: {test}\n")
