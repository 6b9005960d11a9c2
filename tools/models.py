"""Fills the table of docs/models.md with what the code says: `python -m tools.models`."""

import re
from pathlib import Path

from nanovllm.models.registry import MODULES, supported

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
MADE = re.compile(r"(<!-- made: architectures -->\n).*?(<!-- end -->)", re.DOTALL)
"""The part of the page that is written here."""


def page() -> str:
    """Return the text of the page with a new table of all architectures."""
    rows = [
        f"| [`{row.architecture}`](../nanovllm/models/{row.family}.py) | {row.models} |\n"
        for row in map(supported, MODULES)
    ]
    table = "".join(["| Architecture | Models |\n| --- | --- |\n", *rows])
    return MADE.sub(lambda part: f"{part[1]}\n{table}\n{part[2]}", PAGE.read_text("utf-8"))


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
