"""What a part of the run is, and the record into which it writes its figures."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent.parent
"""The root of the repository."""


class Record:
    """A part's figures, saved to disk as they come, and its deadline."""

    def __init__(self, path: Path, seconds: float) -> None:
        self.figures: dict[str, Any] = {}
        self.directory = path.parent
        self._path = path
        self._deadline = time.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds until the deadline."""
        return self._deadline - time.monotonic()

    def save(self) -> None:
        """Write the figures to disk; a reader never sees half a file."""
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.figures, indent=1))
        temporary.replace(self._path)

    def add(self, name: str, row: Any) -> None:
        """Append to the list `name` of the figures, and save."""
        self.figures.setdefault(name, []).append(row)
        print(name, row, flush=True)
        self.save()

    def model(self, name: str) -> str:
        """Return the directory that holds a model's config and tokenizer."""
        return str(self.directory / "models" / name)


class Part(NamedTuple):
    """One part of the run. It runs in a process of its own."""

    run: Callable[[Record], None]
    seconds: float
    """Time limit. It grows where --minutes leaves room."""
    title: str
    lines: Callable[[Mapping[str, Any], Mapping[str, Any]], list[str]]
    """Returns the part's section of the page, from its figures and those of `bandwidth`."""


def describe(error: Exception) -> str:
    """Return the error's type and the first line of its text."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]:.200}"
