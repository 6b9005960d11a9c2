"""The pages in docs/ keep up with the code: links, fields, errors, files and examples.

A python block after `<!-- runs -->` is run, and the text block after it is what it must print. An
sh block after it holds one `nanovllm` command a line, perhaps with a printf as standard input.
"""

import contextlib
import dataclasses
import io
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from nanovllm import LLM, AsyncLLM, demo_model, errors, outputs
from nanovllm.apps.cli import main as cli
from nanovllm.core.messages import Admission
from nanovllm.options.config import Config
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.options.speculative_config import SpeculativeConfig
from tests.floors import APPS, FEATURES

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "nanovllm"
DOCS = ROOT / "docs"
PAGES = {page.name: page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md"))}
LINKED = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("benchmarks/*.md"), *DOCS.rglob("*.md")])
}
"""Every page of the repository, by its path."""

ERRORS = [value for value in vars(errors).values() if isinstance(value, type)]
OUTPUTS = [value for value in vars(outputs).values() if dataclasses.is_dataclass(value)]
EXAMPLE = re.compile(r"<!-- runs -->\n```(python|sh)\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
EXAMPLES: dict[str, tuple[str, str, str]] = {
    f"{name}-{number}": found.groups()  # language, code, output
    for name, text in LINKED.items()
    for number, found in enumerate(EXAMPLE.finditer(text))
}


def outside_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """Return what `page.md#...` can name: GitHub's form of each heading."""
    headings = re.findall(r"^#+ (.+)$", outside_code(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_there_are_pages() -> None:
    assert len(PAGES) >= 12
    assert EXAMPLES
    marked = sum(text.count("<!-- runs -->") for text in LINKED.values())
    assert len(EXAMPLES) == marked, "a marked block lacks its output"


@pytest.mark.parametrize("page", LINKED)
def test_relative_links_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", outside_code(LINKED[page])):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), f"{page} links to {link}"
        if anchor:
            text = LINKED[path.resolve().relative_to(ROOT).as_posix()]
            assert anchor in anchors(text), f"{page} links to {link}"


@pytest.mark.parametrize("page", LINKED)
def test_links_name_files_and_not_lines(page: str) -> None:
    assert not re.search(r"\.py(#L|:)\d", LINKED[page])


@pytest.mark.parametrize("page", LINKED)
def test_python_blocks_compile(page: str) -> None:
    for number, block in enumerate(BLOCK.findall(LINKED[page])):
        compile(block, f"{page}, block {number}", "exec")


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_print_what_the_page_shows(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    language, code, expected = EXAMPLES[example]
    if "structured_outputs" in code:
        pytest.importorskip("llguidance")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if language == "python":
            exec(compile(code, example, "exec"), {"__name__": "example"})
        else:
            for line in code.splitlines():
                run_command(line, monkeypatch)
    assert printed.getvalue() == expected


def run_command(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a line of a sh block in this process."""
    words = shlex.split(line.replace("$MODEL", shlex.quote(demo_model.MODEL)))
    given = ""
    if words[0] == "printf":
        _, text, pipe, *words = words
        assert pipe == "|"
        given = text.encode().decode("unicode_escape")
    assert words[0] == "nanovllm"
    monkeypatch.setattr("sys.stdin", io.StringIO(given))
    assert cli.main(words[1:]) == 0


@pytest.mark.parametrize("owner", [Config, SpeculativeConfig, SamplingParams])
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


def rows(page: str, heading: str) -> dict[str, str]:
    """Return, by its first cell, the rest of each row of the table with this heading."""
    table = PAGES[page].split(f"\n{heading}\n")[1].split("\n\n")[0]
    return dict(re.findall(r"^\| (.+?) \| (.+) \|$", table, re.MULTILINE))


def test_every_field_of_an_admission_is_explained() -> None:
    listed = re.findall(r"`(\w+)`", " ".join(rows("architecture.md", "| Field | What it is |")))
    assert listed == list(Admission._fields)


@pytest.mark.parametrize("owner", OUTPUTS)
def test_every_field_of_an_output_is_listed(owner: type) -> None:
    listed = rows("generation.md", "| Class | Fields |")[f"`{owner.__name__}`"]
    assert re.findall(r"`(\w+)`", listed) == [field.name for field in dataclasses.fields(owner)]


@pytest.mark.parametrize("name", [name for name in dir(LLM) if not name.startswith("_")])
def test_every_method_is_explained(name: str) -> None:
    assert re.search(rf"\bllm\.{name}\b", PAGES["generation.md"])


@pytest.mark.parametrize("name", [name for name in vars(AsyncLLM) if not name.startswith("_")])
def test_every_method_for_asyncio_is_explained(name: str) -> None:
    section = PAGES["generation.md"].split("\n## asyncio\n")[1].split("\n## ")[0]
    assert f"`{name}`" in section


@pytest.mark.parametrize("error", [error.__name__ for error in ERRORS])
def test_every_error_is_explained(error: str) -> None:
    assert re.search(rf"\b{error}\b", PAGES["errors.md"])


def test_every_folder_is_in_the_table() -> None:
    listed = " ".join(rows("architecture.md", "| Folder | What is in it |"))
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    named = set(re.findall(r"(\w+)/", listed)) - {"output_parsers"}
    assert named == {*folders, *FEATURES, *APPS}


def test_nobody_is_told_to_install_another_package() -> None:
    """PyPI's nanovllm is another program; this one is nanovllm-engine there."""
    texts = {str(path): path.read_text("utf-8") for path in PACKAGE.rglob("*.py")} | LINKED
    other = re.compile(r"pip install '?nanovllm(?!-engine)")
    assert [name for name, text in texts.items() if other.search(text)] == []


def test_nobody_is_told_to_replace_a_checkout_by_a_copy() -> None:
    """Without -e, pip copies the checkout, and edits do nothing. A server in /opt is to be one."""
    texts = {str(path): path.read_text("utf-8") for path in PACKAGE.rglob("*.py")} | LINKED
    told = [
        (name, command)
        for name, text in texts.items()
        if name != "CHANGELOG.md"
        for command in re.findall(r"(?<!/opt/nanovllm/bin/)pip install ([^`\n]*)", text)
        if re.search(r"(^| )['\"]?\.(\[| |['\"]|$)", command)
    ]
    assert len(told) > 20
    right = re.compile(r"-e '?\.\S* -c constraints\.txt")
    assert [each for each in told if not right.match(each[1])] == []


def test_make_repairs_a_checkout_that_was_replaced_by_a_copy(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    venv = tmp_path / ".venv"
    (venv / "bin").mkdir(parents=True)
    for name in ("bin/python", ".core", ".dev"):
        (venv / name).touch()

    def commands(target: str) -> str:
        make = ["make", "-n", "-C", str(tmp_path), target]
        return subprocess.run(make, capture_output=True, text=True, check=True).stdout

    assert "install" not in commands("demo") + commands("docs-check")
    (venv / "lib/python3.11/site-packages/nanovllm").mkdir(parents=True)
    assert "constraints.txt -e .\n" in commands("demo")
    assert "constraints.txt -e '.[dev]'\n" in commands("docs-check")
