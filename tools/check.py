"""Runs the tests of what changed since this branch left main, and those of the engine's core.

    python -m tools.check [arguments of pytest]

`make check` runs it after lint and types. A file's tests are those with its name, in the folder
with its folder's name below tests/; without such, the test files that import it, otherwise the
whole folder.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORE = [
    "tests/scheduler",
    "tests/kv",
    "tests/engine",
    "tests/test_generation.py",
    "tests/test_layering.py",
]
"""A change anywhere may break these: the scheduler against its oracle, and plain generation."""
FLOORS = ("features", "apps")
"""Folders of the package that tests/ does not have: tests/lora tests nanovllm/features/lora."""
OF_ALL = {"conftest.py", "helpers.py", "checkpoints.py", "glossary.py"}
"""Files in tests/ that hundreds of tests use: changing them calls for `make test`."""


def changed_files() -> list[str]:
    """Return the files that differ from the commit at which this branch left main, untracked ones
    included.

    On main, that is the commit before the last one.
    """
    base = _git("merge-base", "HEAD", "main") or _git("merge-base", "HEAD", "origin/main")
    if base == _git("rev-parse", "HEAD"):
        base = [*_git("rev-parse", "--verify", "HEAD~1"), *base][:1]
    names = _git("diff", "--name-only", "--diff-filter=d", *base)
    return names + _git("ls-files", "--others", "--exclude-standard")


def _git(*command: str) -> list[str]:
    done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.splitlines()


def find_tests(changed: list[str], root: Path = ROOT) -> list[str]:
    """Return the test files and folders for the files `changed`, all relative to `root`."""
    return sorted({test for name in changed for test in _tests_of(Path(name), root)})


def _tests_of(path: Path, root: Path) -> Iterator[str]:
    tests = root / "tests"
    if path.suffix == ".md":
        yield "tests/test_docs.py"
        return
    if path.parts[0] == "tests" and path.name.startswith("test_"):
        yield str(path)
        return
    folder = tests.joinpath(*(part for part in path.parts[1:-1] if part not in FLOORS))
    if path.parts[0] == "nanovllm" and (named := [*folder.glob(f"test_{path.stem}*.py")]):
        yield from (str(test.relative_to(root)) for test in named)
        return
    if path.suffix == ".py" and not (folder == tests and path.name in OF_ALL):
        module = ".".join(path.with_suffix("").parts)
        parent, _, name = module.rpartition(".")
        imports = (f"import {module}", f"from {module} import", f"from {parent} import {name}")
        users = [test for test in tests.rglob("test_*.py") if _has(test, imports)]
        if users:
            yield from (str(test.relative_to(root)) for test in users)
            return
    while not folder.is_dir():  # for csrc and the like, the nearest folder that has tests
        folder = folder.parent
    if folder != tests and path.parts[0] in ("nanovllm", "tests"):
        yield str(folder.relative_to(root))


def _has(test: Path, imports: tuple[str, ...]) -> bool:
    text = test.read_text(encoding="utf-8")
    return any(line in text for line in imports)


def main() -> int:
    found = find_tests(changed_files())
    targets = [*CORE, *(test for test in found if not test.startswith(tuple(CORE)))]
    command = [sys.executable, "-m", "pytest", "-n", "3", "--dist", "loadfile", *sys.argv[1:]]
    return subprocess.run([*command, *targets], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
