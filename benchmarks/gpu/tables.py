"""Markdown tables, and how numbers are written in them."""

from collections.abc import Iterable, Sequence


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
