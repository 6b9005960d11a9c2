"""`nanovllm learn`: the course in the terminal."""

import argparse

from nanovllm.apps.learn.course import LESSONS, MINI, Lesson, load_answered
from nanovllm.apps.learn.show import show
from nanovllm.errors import ConfigError
from nanovllm.options.flags import Subparsers, add_command
from nanovllm.options.validation import shown
from nanovllm.utils.terminal import write

_TAKES = "learn takes a LESSON, or solution LESSON"
_MORE = (
    "Without arguments it lists the lessons and what you have done. With a LESSON, a number, it "
    "shows the page, runs its script, asks a question and writes the exercise into the current "
    "directory; running the exercise tests it. solution prints an answer."
)


def add_learn(commands: Subparsers) -> None:
    """Add `learn` to the commands."""
    words = "[LESSON | solution LESSON]"
    parser = add_command(commands, learn, words, _TAKES, _MORE)
    parser.add_argument("words", metavar="LESSON", nargs="*", help=argparse.SUPPRESS)


def learn(args: argparse.Namespace) -> int:
    """Learn how an inference engine works, in twelve lessons."""
    match args.words:
        case []:
            _write_list()
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
    answered = load_answered()
    write("How an inference engine works. A lesson takes about twenty minutes.\n\n")
    for lesson in LESSONS:
        state = "question answered" if lesson.number in answered else ""
        write(f"{lesson.number:4}  {lesson.title:32}{state}".rstrip() + "\n")
    for lesson in LESSONS:
        if lesson.number not in answered:
            write(f"\nGo on with: nanovllm learn {lesson.number}\n")
            return
    write(
        "\nYou have answered all questions. What you know now is an engine: read it in 150 lines,\n"
        f"{MINI.resolve()}\n"
    )
