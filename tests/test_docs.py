"""The pages in docs/ keep up with the code: links, fields, errors, files and examples.

A python block after `<!-- runs -->` is run, and the text block after it is what it must print.
"""

import contextlib
import dataclasses
import io
import re
from pathlib import Path

import pytest

from nanovllm import errors
from nanovllm.config import Config
from nanovllm.sampling_params import SamplingParams

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "nanovllm"
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = {page.name: page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md"))}

ERRORS = [value for value in vars(errors).values() if isinstance(value, type)]
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
EXAMPLE = re.compile(r"<!-- runs -->\n```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
EXAMPLES = {
    f"{name}-{number}": found.groups()
    for name, text in PAGES.items()
    for number, found in enumerate(EXAMPLE.finditer(text))
}


def outside_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def test_there_are_pages() -> None:
    assert len(PAGES) >= 8
    assert EXAMPLES
    marked = sum(text.count("<!-- runs -->") for text in PAGES.values())
    assert len(EXAMPLES) == marked, "a marked block lacks its output"


@pytest.mark.parametrize("page", [*PAGES, *([README.name] if README.is_file() else [])])
def test_relative_links_lead_somewhere(page: str) -> None:
    path = README if page == README.name else DOCS / page
    text = outside_code(path.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        target = link.partition("#")[0]
        if target and not re.match(r"[a-z]+:", link):
            assert (path.parent / target).exists(), f"{page} links to {link}"


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_compile(page: str) -> None:
    for number, block in enumerate(BLOCK.findall(PAGES[page])):
        compile(block, f"{page}, block {number}", "exec")


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_print_what_the_page_shows(example: str) -> None:
    code, expected = EXAMPLES[example]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, example, "exec"), {"__name__": "example"})
    assert printed.getvalue() == expected


@pytest.mark.parametrize("owner", [Config, SamplingParams])
def test_every_field_is_listed_with_its_default(owner: type) -> None:
    section = PAGES["configuration.md"].split(f"\n## {owner.__name__}\n")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `(\w+)` \| (.+?) \|", section, re.MULTILINE)
    expected = [
        (
            field.name,
            "required" if field.default is dataclasses.MISSING else f"`{field.default!r}`",
        )
        for field in dataclasses.fields(owner)
    ]
    assert listed == expected


@pytest.mark.parametrize("error", [error.__name__ for error in ERRORS])
def test_every_error_is_explained(error: str) -> None:
    assert re.search(rf"\b{error}\b", PAGES["errors.md"])


def test_every_module_is_named() -> None:
    named = re.findall(r"^\| `([\w/]+\.py)` \|", PAGES["architecture.md"], re.MULTILINE)
    assert sorted(named) == MODULES


@pytest.mark.parametrize("page", PAGES)
def test_links_name_files_and_not_lines(page: str) -> None:
    assert not re.search(r"\.py(#L|:)\d", PAGES[page])
