"""Builds the sdist and the wheel in dist/, and tries both in a fresh environment outside the tree.

    python -m tools.release

`make release` runs it. The version is `nanovllm.__version__`, and the first one in CHANGELOG.md.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import nanovllm

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
TRY = """
import nanovllm
from nanovllm import LLM, SamplingParams, demo_model
from nanovllm.kernels.cpu.library import library

assert nanovllm.__version__ == {version!r}, nanovllm.__version__
assert nanovllm.__file__.startswith({environment!r}), nanovllm.__file__
llm = LLM(demo_model.MODEL)
question, answer = demo_model.entries()[0]
greedy = SamplingParams(temperature=0, max_tokens=160)
(output,) = llm.chat([{{"role": "user", "content": question}}], greedy, use_tqdm=False)
assert output.text.strip() == answer, output.text
print("the C kernels are", "on" if library() else "off")
"""


def changelog_version() -> str:
    """Return the version of the changelog's first heading."""
    found = re.search(r"^## (\S+) - \d{4}-\d{2}-\d{2}$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert found is not None
    return found[1]


def build() -> list[Path]:
    """Build into an empty dist/; return the wheel and the sdist."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", str(DIST), str(ROOT), cwd=ROOT, quiet=True)
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    return [wheel, sdist]


def try_installed(archives: list[Path], directory: Path) -> None:
    """Install each archive into an environment in `directory`, and answer a question with it."""
    environment = directory / "environment"
    venv.create(environment, with_pip=True)
    python = str(environment / "bin" / "python")
    install = (python, "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"))
    for number, archive in enumerate(archives):
        again = ("--force-reinstall", "--no-deps") if number else ()  # the dependencies are there
        run(*install, *again, str(archive), cwd=directory)
        code = TRY.format(version=nanovllm.__version__, environment=str(environment))
        run(python, "-c", code, cwd=directory)
        run(str(environment / "bin" / "nanovllm"), "--help", cwd=directory, quiet=True)
        sys.stdout.write(f"{archive.name} works\n")


def run(*command: str, cwd: Path, quiet: bool = False) -> None:
    """Run a command; end this process if it fails."""
    output = subprocess.DEVNULL if quiet else None
    code = subprocess.run(command, cwd=cwd, stdout=output).returncode
    if code:
        sys.exit(f"{command[0]} {command[1]} failed with {code}")


def main() -> None:
    version = changelog_version()
    if version != nanovllm.__version__:
        sys.exit(f"CHANGELOG.md begins with {version}, but this is {nanovllm.__version__}")
    archives = build()
    with tempfile.TemporaryDirectory() as directory:
        try_installed(archives, Path(directory).resolve())


if __name__ == "__main__":
    main()
