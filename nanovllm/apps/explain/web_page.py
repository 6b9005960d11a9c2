"""Writes a story as one HTML file that holds all it needs: it works without a network."""

import dataclasses
import json
from importlib.resources import files
from pathlib import Path

from nanovllm.apps.explain.story import Story
from nanovllm.options.validation import writing


def write_page(story: Story, path: str) -> None:
    """Write the page; an existing file is overwritten.

    Raises:
        ConfigError: the file cannot be written.
    """
    page = page_of(story)
    with writing("html", path):
        Path(path).write_text(page, encoding="utf-8")


def page_of(story: Story) -> str:
    """Return the page of a story."""
    folder = files("nanovllm.apps.explain").joinpath("page")
    page = folder.joinpath("index.html").read_text("utf-8")
    for name in ("style.css", "app.js"):
        page = page.replace(f"{{{{{name}}}}}", folder.joinpath(name).read_text("utf-8"))
    # A text may hold "</script>", or a comment that would hide the script's end.
    data = json.dumps(dataclasses.asdict(story), ensure_ascii=True, separators=(",", ":"))
    return page.replace("{{story}}", data.replace("<", "\\u003c"))
