"""`nanovllm learn`: the course in the terminal."""

import argparse
from collections.abc import Set
from pathlib import Path

from nanovllm.apps.cli.flag_groups import Commands, add_command
from nanovllm.apps.learn.course import LESSONS, MINI, Lesson, load_progress, remember
from nanovllm.apps.learn.grade import grade
from nanovllm.apps.learn.show import show
from nanovllm.errors import ConfigError
from nanovllm.options.validation import shown
from nanovllm.utils.terminal import write

NOT_SOLVED = 1
"""The exit status where an exercise is not solved yet."""
_TAKES = "learn takes a LESSON, check LESSON [FILE], or solution LESSON"
_MORE = (
    "Without arguments it lists the lessons and what you have done. With a LESSON, a number, it "
    "shows the page, runs its script, asks a question and writes the exercise into the current "
    "directory. check tests the exercise there, or in FILE. solution prints an answer."
)


def add_learn(commands: Commands) -> None:
    """Add `learn` to the commands."""
    words = "[LESSON | check LESSON [FILE] | solution LESSON]"
    parser = add_command(commands, learn, words, _TAKES, _MORE)
    parser.add_argument("words", metavar="LESSON", nargs="*", help=argparse.SUPPRESS)


def learn(args: argparse.Namespace) -> int:
    """Learn how an inference engine works, in twelve lessons."""
    match args.words:
        case []:
            _write_list()
        case ["check", number]:
            return _check(_lesson(number), None)
        case ["check", number, file]:
            return _check(_lesson(number), file)
        case ["solution", number]:
            write(_lesson(number).solution.read_text(encoding="utf-8"))
        case [number]:
            show(_lesson(number))
        case _:
            raise ConfigError(f"{_TAKES}, got {shown(' '.join(args.words))}")
    return 0


def _lesson(number: str) -> Lesson:
    if number.isascii() and number.isdigit() and 1 <= int(number[:9]) <= len(LESSONS):
        return LESSONS[int(number[:9]) - 1]
    raise ConfigError(f"LESSON must be a number from 1 to {len(LESSONS)}, got {shown(number)}")


def _write_list() -> None:
    done = load_progress()
    write("How an inference engine works. A lesson takes about twenty minutes.\n\n")
    for lesson in LESSONS:
        solved, answered = (lesson.number in done[kind] for kind in ("solved", "answered"))
        state = "solved" if solved else "question answered" if answered else ""
        write(f"{lesson.number:4}  {lesson.title:32}{state}".rstrip() + "\n")
    write("\n")
    _write_next(done["solved"])


def _write_next(solved: Set[int]) -> None:
    """Say which lesson comes next, or what comes after the last one."""
    for lesson in LESSONS:
        if lesson.number not in solved:
            write(f"Go on with: nanovllm learn {lesson.number}\n")
            return
    write(
        "You have solved all exercises. What you know now is an engine: read it in 150 lines,\n"
        f"{MINI.resolve()}\n"
    )


def _check(lesson: Lesson, name: str | None) -> int:
    """Test a file, by default the lesson's in this directory, and remember if it is solved."""
    file = Path(name or lesson.exercise.name)
    if not file.is_file():
        raise ConfigError(
            f"there is no file {shown(str(file))} here: nanovllm learn {lesson.number} writes it. "
            "To check another file, give its name after the number"
        )
    if not grade(lesson, file):
        return NOT_SOLVED
    remember("solved", lesson.number)
    write(f"{file.name}: solved.\n")
    _write_next(load_progress()["solved"])
    return 0
