"""Finds links of HTML pages that lead nowhere, and what a page would fetch from another host."""

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """What a page names: its anchors, its links, and what a browser fetches with it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors = {"", "top"}
        self.links: set[str] = set()
        self.fetched: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the attributes of a tag."""
        for name, value in attrs:
            if name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value or "")
            elif name in ("href", "src", "srcset", "data", "poster") and value:
                (self.links if tag == "a" else self.fetched).add(value)


def check(folder: Path) -> list[str]:
    """Return a line for each fault of the pages in a folder."""
    pages = {path: Page(path.read_text("utf-8")) for path in folder.rglob("*.html")}
    faults = []
    for path, page in pages.items():
        for link in page.links | page.fetched:
            scheme, host, to, _, anchor = urlsplit(link)
            if scheme in ("data", "mailto") or (host and link in page.links):
                continue
            target = (path.parent / unquote(to)).resolve() if to else path
            if scheme or host:
                fault = "is on another host"
            elif not target.exists():
                fault = "does not exist"
            elif target in pages and unquote(anchor) not in pages[target].anchors:
                fault = "has no such heading"
            else:
                continue
            faults.append(f"{path.relative_to(folder)}: {link} {fault}")
    for sheet in folder.rglob("*.css"):
        text = sheet.read_text("utf-8")
        if "@import" in text or "url(http" in text or "url(//" in text:
            faults.append(f"{sheet.relative_to(folder)} fetches from another place")
    return sorted(faults)
