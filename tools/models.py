"""Fills the table of docs/models.md with what the code says: `python -m tools.models`."""

from pathlib import Path

from nanovllm.models.registry import MODULES, supported
from tools.made_tables import PART, table

PAGE = Path(__file__).parent.parent / "docs" / "models.md"


def page() -> str:
    """Return the text of the page with a new table of all architectures."""
    rows = [
        (f"[`{row.architecture}`](../nanovllm/models/{row.family}.py)", row.models)
        for row in map(supported, MODULES)
    ]
    architectures = table(("Architecture", "Models"), rows)
    return PART.sub(
        lambda part: f"{part[1]}\n{architectures}\n\n{part[3]}", PAGE.read_text("utf-8")
    )


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
