"""The lessons of docs/course: their files, what their pages say, and which a learner has done.

`docs` in this folder is a link to the repository's docs, and a copy of the course in an installed
package. So the course has one source.
"""

import contextlib
import dataclasses
import json
import os
import re
from functools import cached_property
from pathlib import Path

from nanovllm.utils.disk_cache import state_directory
from nanovllm.utils.terminal import complain

DOCS = Path(__file__).parent / "docs"
MINI = DOCS / "mini.py"
"""The engine in one file, which is what the course leads to."""
_PROGRESS = "learn.json"
_OUTPUT = re.compile(r"^```text\n(.*?)^```", re.DOTALL | re.MULTILINE)
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_QUESTION = re.compile(
    r"^## Question\n\n(?P<question>.*?)\n\n"
    r"<details><summary>Answer</summary>\n\n`(?P<answer>.*?)`: (?P<reason>.*?)\n\n</details>\n\n",
    re.DOTALL | re.MULTILINE,
)


@dataclasses.dataclass(frozen=True)
class Lesson:
    """A lesson: a folder with a page, a script that it shows, an exercise and its solution."""

    folder: Path

    @property
    def number(self) -> int:
        return int(self.folder.name[:2])

    @property
    def script(self) -> Path:
        """The file that prints the outputs of the page."""
        return self._file("lesson")

    @property
    def exercise(self) -> Path:
        """The file with a function to write, and with `check`, which tests it."""
        return self._file("exercise")

    @property
    def solution(self) -> Path:
        return self._file("solution")

    @cached_property
    def page(self) -> str:
        """The Markdown of the page."""
        return (self.folder / "README.md").read_text(encoding="utf-8")

    @property
    def title(self) -> str:
        return self.page.partition("\n")[0].removeprefix(f"# {self.number}. ")

    @property
    def output(self) -> str:
        """What the script prints, as the page shows it."""
        return "".join(_OUTPUT.findall(self.page))

    @property
    def question(self) -> str:
        return self._asked["question"]

    @property
    def answer(self) -> str:
        """The number that answers the question."""
        return self._asked["answer"]

    @property
    def reason(self) -> str:
        """Why the answer is right, as a sentence after a colon."""
        return self._asked["reason"]

    @property
    def text(self) -> str:
        """The Markdown of the page up to the question."""
        return self.page[: self._asked.start()]

    @property
    def task(self) -> str:
        """The Markdown of the exercise, without the link to the next page."""
        return self.page[self._asked.end() :].rpartition("\nNext: ")[0]

    def is_right(self, answer: str) -> bool:
        """Return whether an answer, such as "4 blocks", has the right number and no other."""
        return _NUMBER.findall(answer.replace(",", "")) == [self.answer]

    @cached_property
    def _asked(self) -> re.Match[str]:
        found = _QUESTION.search(self.page)
        assert found is not None, f"{self.folder}: the page has no question in the form expected"
        return found

    def _file(self, kind: str) -> Path:
        return self.folder / f"{kind}_{self.folder.name[:2]}.py"


LESSONS = tuple(Lesson(folder) for folder in sorted((DOCS / "course").glob("[0-9][0-9]_*")))


def load_answered() -> set[int]:
    """Return the numbers of the lessons whose question was answered.

    A file that cannot be read, or is damaged, counts as empty.
    """
    directory = state_directory()
    if directory is not None:
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
            found = json.loads((directory / _PROGRESS).read_text(encoding="utf-8"))
            return {int(number) for number in found.get("answered", ())}
    return set()


def remember_answered(number: int) -> None:
    """Note that the question of a lesson was answered."""
    answered = load_answered()
    if number in answered:
        return
    directory = state_directory()
    if directory is None:
        complain("nanovllm: progress is not kept: this user has no home directory")
        return
    text = json.dumps({"answered": sorted({*answered, number})}) + "\n"
    new = directory / f"{_PROGRESS}.{os.getpid()}"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        new.write_text(text, encoding="utf-8")
        new.replace(directory / _PROGRESS)  # whole or not at all
    except OSError as error:
        complain(f"nanovllm: progress is not kept in {directory}: {error.strerror}")
