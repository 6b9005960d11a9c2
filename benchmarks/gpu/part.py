"""What a part of the run is, the record into which it writes its figures, and Markdown tables."""

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent.parent
"""The root of the repository."""


class Record:
    """A part's figures, saved to disk as they come, and its deadline.

    Args:
        path: the file of the figures.
        scratch: a directory for what nobody wants to keep.
        seconds: until the deadline.
    """

    def __init__(self, path: Path, scratch: Path, seconds: float) -> None:
        self.figures: dict[str, Any] = {}
        self.scratch = scratch
        self._path = path
        self._deadline = time.monotonic() + seconds

    def listen(self) -> None:
        """Keep what nanovllm logs from now on in the list "log"."""
        logger = logging.getLogger("nanovllm")
        logger.setLevel(logging.DEBUG)
        logger.addHandler(_Messages(self.figures))

    def left(self) -> float:
        """Return the seconds until the deadline."""
        return self._deadline - time.monotonic()

    def has_time(self, seconds: float, what: str) -> bool:
        """Return whether `seconds` are left; if not, note that `what` is left out."""
        if self.left() >= seconds:
            return True
        self.add("left_out", what)
        return False

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

    def attempt(self, name: str, label: Mapping[str, Any], work: Callable[[], Any]) -> None:
        """Add the mapping that `work` returns to the list `name`, or why it failed.

        Raises:
            torch.AcceleratorError: the CUDA context is lost, so this process can run nothing more.
        """
        import torch

        try:
            row = work()
        except Exception as error:
            self.add(name, {**label, "error": describe(error)})
            if isinstance(error, torch.AcceleratorError):
                raise
        else:
            self.add(name, {**label, **row})


class _Messages(logging.Handler):
    """Keeps each message once in the list "log" of `figures`, up to a number of them."""

    def __init__(self, figures: dict[str, Any]) -> None:
        super().__init__()
        self._figures = figures

    def emit(self, record: logging.LogRecord) -> None:
        log = self._figures.setdefault("log", [])
        message = f"{record.name.removeprefix('nanovllm.')}: {record.getMessage()}"
        if message not in log and len(log) < _MESSAGES:
            log.append(message)
            print(message, flush=True)


_MESSAGES = 30


class Part(NamedTuple):
    """One part of the run. It runs in a process of its own."""

    run: Callable[[Record], None]
    seconds: float
    """Time limit, enforced: the part is killed when it is over."""
    title: str
    lines: Callable[[Mapping[str, Any], Mapping[str, Any]], list[str]]
    """Returns the part's section of the page, from its figures and those of `bandwidth`."""


def describe(error: Exception) -> str:
    """Return the error's type and the first line of its text."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]:.200}"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = []
    for row in (head, ["---"] * len(head), *rows):
        cells = [" ".join(str(cell).split()).replace("|", "\\|") for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def percent(value: float | None, digits: int = 0) -> str:
    """Return a share as a percentage, or a dash for None."""
    return "–" if value is None else f"{100 * value:.{digits}f}%"
