"""docs/changing.md: its changes are applied to a copy of the tree; with EVERY_CASE=1 its tests and
mypy run there.

A ```diff block after `<!-- applies -->` has a line ` # PATH` before the hunks of each file, and a
line ` ...` between hunks. The lines of a hunk that are not new must be in the file exactly once. A
```python block after `<!-- new: PATH -->` is a new file. `<!-- tests: ARGUMENTS -->` is for pytest.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "changing.md").read_text(encoding="utf-8")
DIFFS = re.findall(r"<!-- applies -->\n```diff\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
NEW_FILES = re.findall(r"<!-- new: (.+?) -->\n```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
TESTS = re.findall(r"<!-- tests: (.+?) -->", PAGE)
RUN_EACH = """
import pytest, shlex, sys
for arguments in sys.argv[1:]:
    if code := pytest.main(["-x", "-p", "no:cacheprovider", *shlex.split(arguments)]):
        sys.exit(code)
"""


@pytest.fixture(scope="module")
def changed_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree with all changes of the page."""
    tree = tmp_path_factory.mktemp("changed")
    for name in ("nanovllm", "tests", "pyproject.toml"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree / name)
    for path, code in NEW_FILES:
        assert not (tree / path).exists(), f"{path} is not new"
        (tree / path).write_text(code, encoding="utf-8")
    for diff in DIFFS:
        for path, hunk in hunks(diff):
            apply(tree / path, hunk)
    return tree


def hunks(diff: str) -> Iterator[tuple[str, list[str]]]:
    """Yield (path, lines) of each hunk."""
    path, lines = "", []
    for line in [*diff.splitlines(), " # "]:
        header = re.match(r" # (\S*)", line)
        if header or line == " ...":
            if lines:
                yield path, lines
            lines = []
        elif line:
            lines.append(line)
        path = header[1] if header else path


def apply(path: Path, hunk: list[str]) -> None:
    before = "".join(line[1:] + "\n" for line in hunk if line[0] != "+")
    after = "".join(line[1:] + "\n" for line in hunk if line[0] != "-")
    text = path.read_text(encoding="utf-8")
    assert text.count(before) == 1, f"{path.name} has {text.count(before)} times:\n{before}"
    path.write_text(text.replace(before, after), encoding="utf-8")


def run(tree: Path, *arguments: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_every_change_is_applied(changed_tree: Path) -> None:
    assert len(DIFFS) == PAGE.count("```diff")
    assert len(NEW_FILES) >= 2
    assert TESTS
    for path in [*(path for path, _ in NEW_FILES), *(p for diff in DIFFS for p, _ in hunks(diff))]:
        if path.endswith(".py"):
            compile((changed_tree / path).read_text(), path, "exec")


@pytest.mark.long
def test_the_types_are_right(changed_tree: Path) -> None:
    changed = [path for path, _ in NEW_FILES]
    changed += {path for diff in DIFFS for path, _ in hunks(diff)}
    sources = [path for path in changed if path.startswith("nanovllm/")]
    run(changed_tree, "-m", "mypy", "--cache-dir", str(ROOT / ".mypy_cache" / "changed"), *sources)


@pytest.mark.long
def test_the_tests_that_the_page_names_pass(changed_tree: Path) -> None:
    """One after another in one process, whose start takes longer than they do."""
    run(changed_tree, "-c", RUN_EACH, *TESTS)
