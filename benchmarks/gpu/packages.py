"""Which packages are not installed here: those that the project names, and those of a test file.

Reads source and imports none of it.
"""

import ast
import functools
import importlib.metadata
import importlib.util
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.part import ROOT

LOCAL = ("nanovllm", "tests", "benchmarks", "tools", "bench")
"""The modules of the repository."""


def missing_packages() -> list[str]:
    """Return the packages of pyproject.toml, those for tests and servers too, that are missing."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["dev"], *extras["server"], *extras["structured"]]
    names = {re.split(r"[^\w.-]", requirement)[0] for requirement in wanted} - {project["name"]}
    return sorted(name for name in names if not _is_installed(name))


def missing_imports(test: Path) -> set[str]:
    """Return the missing packages without which pytest cannot import the file `test`.

    Counts what the file, its conftest.py files and the repository's modules import at their top.
    """
    folders = [folder for folder in test.parents if folder.is_relative_to(ROOT / "tests")]
    conftests = [folder / "conftest.py" for folder in folders]
    seen: set[Path] = set()
    todo = [test, *(path for path in conftests if path.exists())]
    packages: set[str] = set()
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        for module in imports_of(path):
            if module.partition(".")[0] in LOCAL:
                todo += _files_of(module)
            else:
                packages.add(module.partition(".")[0])
    return {name for name in packages if importlib.util.find_spec(name) is None}


@functools.cache
def imports_of(path: Path) -> tuple[str, ...]:
    """Return the modules that a file imports at its top, without those in `if` and `try`."""
    return tuple(_imports(ast.parse(path.read_text(encoding="utf-8"))))


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            # A name may be a module of the package.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _files_of(module: str) -> list[Path]:
    path = ROOT.joinpath(*module.split("."))
    return [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()]


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
