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

from docutils import nodes
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
FENCE = re.compile(r"(^ *```.*?^ *```)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<=\]\()([^)\s#]*)(#[^)\s]*|)(?=\))")


def find_pages() -> dict[str, str]:
    """Return the site's name, without .html, of each page by its path in the repository."""
    found = dict(SITE["names"])
    for path in sorted((ROOT / "docs").rglob("*.md")):
        name = path.relative_to(ROOT / "docs").with_suffix("").as_posix()
        found[f"docs/{name}.md"] = re.sub(r"README$", "index", name)
    return found


class Links:
    """Where the links of pages lead on the site, and the sources that they name."""

    def __init__(self, pages: dict[str, str]) -> None:
        self.pages = pages
        self.sources: set[str] = set()
        """Files and folders, by their paths in the repository."""

    def rewritten(self, page: str, text: str) -> str:
        """Return a page's text as it must be on the site: its links, and diagrams for site.js."""
        parts = FENCE.split(text)  # the odd ones are code
        for number, part in enumerate(parts):
            if number % 2 == 0:
                parts[number] = LINK.sub(lambda found: self._target(page, *found.groups()), part)
            elif part.startswith("```mermaid\n"):
                diagram = html.escape(part[11:-3])
                parts[number] = f'<pre class="diagram">\n{diagram}</pre>'
        return "".join(parts)

    def _target(self, page: str, link: str, anchor: str) -> str:
        if re.match(r"[a-z]+:", link):
            return link + anchor
        folder = os.path.dirname(self.pages[page])
        path = os.path.normpath(os.path.join(os.path.dirname(page), link)) if link else page
        if path == "README.md" and anchor == "#install":
            return os.path.relpath("install.md", folder) + anchor
        if not link:
            return anchor
        if path in self.pages:
            return os.path.relpath(self.pages[path] + ".md", folder) + anchor
        if path.startswith("docs/pictures/"):
            return os.path.relpath(path.removeprefix("docs/"), folder)
        self.sources.add(path)
        return "source:" + path


def stage(pages: dict[str, str]) -> Links:
    """Write the copy that Sphinx reads; return its links."""
    shutil.rmtree(STAGE, ignore_errors=True)
    shutil.copytree(HERE / "pages", STAGE)
    shutil.copytree(ROOT / "docs/pictures", STAGE / "pictures")
    found = Links(pages)
    texts = {
        name: found.rewritten(page, (ROOT / page).read_text("utf-8"))
        for page, name in pages.items()
    }
    before, install, after = re.split(
        r"^## Install\n(.*?)(?=^## )", texts["index"], flags=re.DOTALL | re.MULTILINE
    )
    texts["install"] = "# Install\n" + install
    texts["index"] = before + after + "".join(toctree(*each) for each in SITE["navigation"].items())
    lessons = sorted(name for name in texts if re.match(r"course/\d", name))
    texts["course/index"] += toctree("", [name.removeprefix("course/") for name in lessons])
    command = SITE["run"]["command"]
    texts["explain"] += (
        f"\n## A run\n\n```bash\n{command}```\n\n"
        '<a href="run.html">The page that this command wrote</a>, when the site was built:\n\n'
        '<iframe src="run.html" title="Steps of a run" loading="lazy"></iframe>\n'
    )
    for name, text in texts.items():
        path = STAGE / f"{name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return found


def toctree(caption: str, entries: list[str]) -> str:
    """Return a part of the navigation."""
    option = f":caption: {caption}\n" if caption else ""
    lines = "\n".join(entries)
    return f"\n```{{toctree}}\n:hidden:\n{option}\n{lines}\n```\n"


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


def on_doctree_resolved(app: Sphinx, doctree: Any, docname: str) -> None:
    """Point links to files of the repository at their pages."""
    for link in doctree.findall(nodes.reference):
        scheme, _, path = link.get("refuri", "").partition(":")
        if scheme == "source":
            link["refuri"] = app.builder.get_relative_uri(docname, f"source/{path}")


def tracked(path: str) -> list[str]:
    """Return the files that git has at this path."""
    command = ["git", "-C", str(ROOT), "ls-files", "--", path]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()


def source_pages(sources: set[str]) -> Iterator[tuple[str, dict[str, str], str]]:
    """Yield name, context and template of a page for each file, and each folder with its files."""
    files = {file for path in sources for file in tracked(path) if path != "tests"}
    for folder in sources - files:
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


def build(target: Path) -> int:
    """Build the site into `target`; return the number of faults, which are printed."""
    found = stage(find_pages())
    ((name, mermaid),) = fetch(MERMAID_PACKAGE, (MERMAID,))
    shutil.copytree(HERE / "static", STAGE / "_static")
    (STAGE / "_static" / name).write_bytes(mermaid)
    shutil.rmtree(target, ignore_errors=True)
    settings = SITE["sphinx"] | {"html_title": f"nanovllm {nanovllm.__version__}"}
    app = Sphinx(
        STAGE,
        None,
        target,
        STAGE.parent / "site-doctrees",
        "html",
        confoverrides=settings,
        freshenv=True,
        status=None,
        warningiserror=True,
    )
    app.connect("autodoc-process-signature", on_signature)
    app.connect("autodoc-process-docstring", on_docstring)
    app.connect("doctree-resolved", on_doctree_resolved)
    app.connect("html-collect-pages", lambda app: source_pages(found.sources))
    app.build()
    run = shlex.split(SITE["run"]["command"].replace("run.html", str(target / "run.html")))
    subprocess.run([sys.executable, "-m", *run], cwd=ROOT, check=True)
    faults = links.check(target)
    sys.stderr.writelines(f"{fault}\n" for fault in faults)
    return app.statuscode or len(faults)


if __name__ == "__main__":
    sys.exit(min(build(ROOT / "site"), 1))
