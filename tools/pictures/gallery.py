"""The pictures of docs/pictures, by file name, and which of them are out of date."""

from collections.abc import Callable
from pathlib import Path

from benchmarks import plot
from benchmarks.comparison import Comparison
from tools.pictures import block_table, course, roofline, schedule, speculation

DIRECTORY = Path(__file__).parent.parent.parent / "docs" / "pictures"


def versus() -> str:
    """Return the chart of versus.json."""
    return plot.draw(Comparison.load(DIRECTORY / "versus.json"))


PICTURES: dict[str, Callable[[], str]] = {
    "block_table.svg": block_table.draw,
    "schedule.svg": schedule.draw,
    "roofline.svg": roofline.draw,
    "speculation.svg": speculation.draw,
    "versus.svg": versus,
    **course.PICTURES,
}


def outdated() -> dict[str, str]:
    """Return the new content of each picture that differs from its file."""
    drawn = {name: draw() for name, draw in PICTURES.items()}
    return {name: svg for name, svg in drawn.items() if svg != read(name)}


def read(name: str) -> str | None:
    """Return a picture's file, or None if there is none."""
    path = DIRECTORY / name
    return path.read_text(encoding="utf-8") if path.exists() else None
