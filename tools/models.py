"""Fills the tables of docs/models.md with what the code says: `python -m tools.models`."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from nanovllm.models.model_config import ONLY_SOME_READ
from nanovllm.models.registry import MODULES, family_class, supported
from nanovllm.models.rope_fields import FAMILY_KEYS

_ROPE: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(FAMILY_KEYS, ()),
    "partial_rotary_factor": (1,),
}

PART = re.compile(r"(<!-- made: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
"""A part of a page that a tool writes."""
PAGE = Path(__file__).parent.parent / "docs" / "models.md"


def page() -> str:
    """Return the text of the page with new tables."""
    text = PAGE.read_text("utf-8")
    return PART.sub(lambda part: f"{part[1]}\n{PARTS[part[2]]()}\n\n{part[3]}", text)


def table(heading: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    lines = [heading, tuple("---" for _ in heading), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def architectures() -> str:
    """Return a table of all architectures."""
    rows = [
        (
            f"`{row.architecture}`",
            f"[{row.family}.py](../nanovllm/models/{row.family}.py)",
            row.models,
            row.layers,
        )
        for row in map(supported, MODULES)
    ]
    return table(("Architecture", "File", "Models", "What the layers have"), rows)


def fields() -> str:
    """Return a table of the fields that only some families support."""
    accepted = {**ONLY_SOME_READ, "layer_types": ("full_attention in all",), **_ROPE}
    rows = []
    for field, neutral in accepted.items():
        honour = {MODULES[name]: 0 for name in MODULES if field in family_class(name).reads}
        others = " or ".join(str(value) for value in neutral if value is not None) or "absent"
        rows.append((f"`{field}`", ", ".join(honour) or "none", others))
    return table(("Field", "Files that honour it", "What the others accept"), rows)


PARTS: dict[str, Callable[[], str]] = {"architectures": architectures, "fields": fields}
"""The text to put after each mark `<!-- made: ... -->` in the page."""

if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
