"""Builds sdist and wheels in dist/, and tries those for here in an environment outside the tree.

    python -m tools.release

`make release` runs it. The version is `nanovllm.__version__`, and the first one in CHANGELOG.md.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import nanovllm
from tools import wheels
from tools.wheels import DIST, ROOT

HERE = f"linux_{platform.machine()}"
TRY = """
import nanovllm
from nanovllm import LLM, SamplingParams, demo_model
from nanovllm.kernels.cpu.library import description

assert nanovllm.__version__ == {version!r}, nanovllm.__version__
assert nanovllm.__file__.startswith({environment!r}), nanovllm.__file__
llm = LLM(demo_model.MODEL)
question, answer = demo_model.entries()[0]
greedy = SamplingParams(temperature=0, max_tokens=160)
(output,) = llm.chat([{{"role": "user", "content": question}}], greedy, use_tqdm=False)
assert output.text.strip() == answer, output.text
assert description() or not {with_libraries}, "there are no C kernels"
print("C kernels:", description())
"""


def changelog_version() -> str:
    """Return the version of the changelog's first heading."""
    found = re.search(r"^## (\S+) - \d{4}-\d{2}-\d{2}$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert found is not None
    return found[1]


def build() -> list[Path]:
    """Build all wheels and the sdist into an empty dist/; return them."""
    shutil.rmtree(DIST, ignore_errors=True)
    archives = wheels.build([*wheels.TARGETS, "any"])
    for archive in archives:
        if "manylinux" in archive.name:
            check_platform(archive)
    return archives


def check_platform(wheel: Path) -> None:
    """End this process if a library in `wheel` needs a newer glibc than the wheel's name says."""
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r'platform tag:\s+"manylinux_2_(\d+)_\w+"', shown)
    named = re.search(r"manylinux_2_(\d+)_", wheel.name)
    if not (found and named and int(found[1]) <= int(named[1])):
        sys.exit(f"auditwheel does not find what the name of {wheel.name} says:\n{shown}")


def try_installed(archives: list[Path], directory: Path) -> None:
    """Install each archive that runs here into an environment in `directory`, and answer a question
    with it. The wheel with kernels gets no compiler and no place for a cache.
    """
    environment = directory / "environment"
    venv.create(environment, with_pip=True)
    programs = environment / "bin"
    python = str(programs / "python")
    install = (python, "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"))
    tag = wheels.TARGETS[HERE].tag if HERE in wheels.TARGETS else "any"
    here = [each for each in archives if re.search(rf"-{tag}\.whl|-any\.whl|\.gz", each.name)]
    for number, archive in enumerate(here):
        again = ("--force-reinstall", "--no-deps") if number else ()  # the dependencies are there
        run(*install, *again, str(archive), cwd=directory)
        with_libraries = archive.name.endswith(f"-{tag}.whl") and tag != "any"
        code = TRY.format(
            version=nanovllm.__version__,
            environment=str(environment),
            with_libraries=with_libraries,
        )
        bare = {"PATH": str(programs), "XDG_CACHE_HOME": os.devnull} if with_libraries else {}
        run(python, "-c", code, cwd=directory, variables=bare)
        run(str(programs / "nanovllm"), "--help", cwd=directory, quiet=True)
        sys.stdout.write(f"{archive.name} works\n")


def run(
    *command: str, cwd: Path, quiet: bool = False, variables: dict[str, str] | None = None
) -> None:
    """Run a command, with `variables` in its environment; end this process if it fails."""
    output = subprocess.DEVNULL if quiet else None
    environment = os.environ | (variables or {})
    code = subprocess.run(command, cwd=cwd, stdout=output, env=environment).returncode
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
