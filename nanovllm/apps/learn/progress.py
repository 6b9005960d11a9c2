"""Remembers between processes which questions a learner has answered and which exercises solved."""

import contextlib
import json
import os

from nanovllm.utils.disk_cache import state_directory
from nanovllm.utils.terminal import complain

FILE = "learn.json"
KINDS = ("answered", "solved")


def load() -> dict[str, set[int]]:
    """Return the numbers of the lessons whose question was answered, and whose exercise solved.

    A file that cannot be read, or is damaged, counts as empty.
    """
    directory = state_directory()
    if directory is not None:
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
            found = json.loads((directory / FILE).read_text(encoding="utf-8"))
            return {kind: {int(number) for number in found.get(kind, ())} for kind in KINDS}
    return {kind: set() for kind in KINDS}


def remember(kind: str, number: int) -> None:
    """Note that the question of a lesson is "answered", or its exercise "solved"."""
    progress = load()
    if number in progress[kind]:
        return
    progress[kind].add(number)
    directory = state_directory()
    if directory is None:
        complain("nanovllm: progress is not kept: this user has no home directory")
        return
    text = json.dumps({kind: sorted(numbers) for kind, numbers in progress.items()}) + "\n"
    new = directory / f"{FILE}.{os.getpid()}"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        new.write_text(text, encoding="utf-8")
        new.replace(directory / FILE)  # whole or not at all
    except OSError as error:
        complain(f"nanovllm: progress is not kept in {directory}: {error.strerror}")
