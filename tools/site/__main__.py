"""Builds the site: pages as they are in the repository, the API, sources, and a run explained.

    python -m tools.site

Sphinx reads a copy of the pages whose links lead to other pages of the site. A warning of Sphinx,
such as a missing heading or a page without a place in site.toml, ends the build; so does a link
that leads nowhere (links.py).
"""

import dataclasses
import html
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx.application import Sphinx
from sphinx.ext.napoleon import GoogleDocstring

import nanovllm
from tools.page_vendor import File, fetch
from tools.site import links

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
STAGE = ROOT / "build/site"
"""The copy of the pages, which each build makes anew."""
SITE = tomllib.loads((HERE / "site.toml").read_text("utf-8"))
MERMAID = File(
    "dist/mermaid.tiny.js",
    "mermaid.js",
    "7a644017d37f93c8359790884e6b67fb1f747c78eb20475952404bd87190a3f8",
)
MERMAID_PACKAGE = "@mermaid-js/tiny@11.17.2"
BACK = '<p><a href="explain.html" target="_top">nanovllm: steps of a run</a></p>'
"""A link in run.html, which also is a frame of the page that it leads to."""
FENCE = re.compile(r"(^ *```.*?^ *```)", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r'<section id="([^"]+)">\s*<(h[1-6])>')
SOURCE = re.compile(r"\]\(source:([^)#]+)\.html")
LINK = re.compile(r"(?<=\]\()([^)\s#]*)(#[^)\s]*|)(?=\))")


def find_pages() -> dict[str, str]:
    """Return the site's name, without .html, of each page by its path in the repository."""
    found = dict(SITE["names"])
    for path in sorted((ROOT / "docs").rglob("*.md")):
        name = path.relative_to(ROOT / "docs").with_suffix("").as_posix()
        found[f"docs/{name}.md"] = re.sub(r"README$", "index", name)
    return found


def target(page: str, link: str, anchor: str, pages: dict[str, str]) -> str:
    """Return a page's link as it must be on the site; one to a source begins with "source:"."""
    folder = os.path.dirname(pages[page])
    path = os.path.normpath(os.path.join(os.path.dirname(page), link)) if link else page
    if re.match(r"[a-z]+:", link):
        found = link
    elif path == "README.md" and anchor == "#install":
        found = os.path.relpath("install.md", folder)
    elif not link:
        found = ""
    elif path in pages:
        found = os.path.relpath(pages[path] + ".md", folder)
    elif path.startswith("docs/pictures/"):
        found = os.path.relpath(path.removeprefix("docs/"), folder)
    else:
        found = f"source:{path}.html"
    return found + anchor


def rewritten(page: str, pages: dict[str, str]) -> str:
    """Return a page's text as it must be on the site: its links, and diagrams for site.js."""
    parts = FENCE.split((ROOT / page).read_text("utf-8"))  # the odd ones are code
    for number, part in enumerate(parts):
        if number % 2 == 0:
            plain = re.sub(r"\[([\w./]+)\.md\]\(", r"[\1](", part)  # here no file is Markdown
            parts[number] = LINK.sub(lambda found: target(page, found[1], found[2], pages), plain)
        elif part.startswith("```mermaid\n"):
            parts[number] = f'<pre class="diagram">\n{html.escape(part[11:-3])}</pre>'
    return "".join(parts)


def stage(pages: dict[str, str]) -> dict[str, str]:
    """Write the copy that Sphinx reads; return its texts.

    A file in pages/ is a page of the site alone, or the end of the page that has its name.
    """
    shutil.rmtree(STAGE, ignore_errors=True)
    shutil.copytree(ROOT / "docs/pictures", STAGE / "pictures")
    shutil.copytree(HERE / "static", STAGE / "_static")
    shutil.copytree(HERE / "templates", STAGE / "_templates")
    texts = {name: rewritten(page, pages) for page, name in pages.items()}
    before, install, after = re.split(
        r"^## Install\n(.*?)(?=^## )", texts["index"], flags=re.DOTALL | re.MULTILINE
    )
    texts |= {"index": before + after, "install": "# Install\n" + install}
    for path in (HERE / "pages").rglob("*.md"):
        name = path.relative_to(HERE / "pages").with_suffix("").as_posix()
        texts[name] = texts.get(name, "") + path.read_text("utf-8")
    for name, text in texts.items():
        path = STAGE / f"{name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return texts


def on_signature(app: Sphinx, what: str, name: str, found: Any, *_: object) -> Any:
    """Leave a dataclass its fields, without the checks that are in their annotations."""
    if not dataclasses.is_dataclass(found):
        return None
    found.__annotations__ = get_type_hints(found)
    return "", ""


def on_docstring(app: Sphinx, what: str, name: str, found: Any, options: Any, lines: Any) -> None:
    """Read sections such as "Raises:"; a field's text has none."""
    if what not in ("attribute", "property"):
        lines[:] = GoogleDocstring(lines).lines()


def on_page_context(app: Sphinx, name: str, template: str, context: Any, doctree: Any) -> None:
    """Point links at the sources' pages; give headings the names that the search leads to."""
    body = HEADING.sub(r'<section><\2 id="\1">', context.get("body", ""))
    context["body"] = body.replace('href="source:', f'href="{"../" * name.count("/")}source/')


def tracked(path: str) -> list[str]:
    """Return the files that git has at this path."""
    command = ["git", "-C", str(ROOT), "ls-files", "--", path]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()


def source_pages(sources: set[str]) -> Iterator[tuple[str, dict[str, str], str]]:
    """Yield name, context and template of a page for each file, and each folder with its files."""
    files = {file for path in sources for file in tracked(path) if path != "tests"}
    for folder in filter(tracked, sources - files):  # links.py finds what does not exist
        base = os.path.dirname(folder)
        names = "".join(
            f'<li><a href="{os.path.relpath(file, base)}.html">{file}</a></li>'
            if file in files
            else f"<li>{file}</li>"
            for file in tracked(folder)
        )
        body = f"<h1>{folder}/</h1><ul>{names}</ul>"
        yield f"source/{folder}", {"title": f"{folder}/", "body": body}, "page.html"
    for file in files:
        try:
            lexer = get_lexer_for_filename(file)
        except ClassNotFound:
            lexer = TextLexer()
        text = (ROOT / file).read_text("utf-8")
        code = highlight(text, lexer, HtmlFormatter())
        body = f"<h1>{file}</h1>{code}"
        yield f"source/{file}", {"title": file, "body": body}, "page.html"


def build(folder: Path) -> int:
    """Build the site into `folder`; return the number of faults, which are printed."""
    texts = stage(find_pages())
    sources = {path for text in texts.values() for path in SOURCE.findall(text)}
    ((name, mermaid),) = fetch(MERMAID_PACKAGE, (MERMAID,))
    (STAGE / "_static" / name).write_bytes(mermaid)
    shutil.rmtree(folder, ignore_errors=True)
    settings = SITE["sphinx"] | {"html_title": f"nanovllm {nanovllm.__version__}"}
    app = Sphinx(
        STAGE,
        None,
        folder,
        STAGE.parent / "site-doctrees",
        "html",
        confoverrides=settings,
        freshenv=True,
        status=None,
        warningiserror=True,
    )
    app.builder.search = False
    app.connect("autodoc-process-signature", on_signature)
    app.connect("autodoc-process-docstring", on_docstring)
    app.connect("html-page-context", on_page_context)
    app.connect("html-collect-pages", lambda app: source_pages(sources))
    app.build()
    command = re.findall(r"^nanovllm explain.*?(?=^```)", texts["explain"], re.DOTALL | re.M)[-1]
    run = shlex.split(command.replace("\\\n", "").replace("run.html", str(folder / "run.html")))
    subprocess.run([sys.executable, "-m", *run], cwd=ROOT, check=True)
    page = (folder / "run.html").read_text("utf-8")
    page = page.replace("<header>", f"<header>{BACK}", 1)
    (folder / "run.html").write_text(page, "utf-8")
    search = [sys.executable, "-m", "pagefind", "--site", str(folder), *SITE["pagefind"]]
    subprocess.run(search, check=True)
    faults = links.check(folder)
    sys.stderr.writelines(f"{fault}\n" for fault in faults)
    return app.statuscode or len(faults)


if __name__ == "__main__":
    sys.exit(min(build(ROOT / "site"), 1))
