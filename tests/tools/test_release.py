"""What a release needs: one version everywhere, and every file of the package in the wheel."""

import subprocess
import sys
import tomllib
import zipfile

import pytest

import nanovllm
from tests.helpers import ROOT
from tools import release

NOT_PACKAGED = {".clang-format"}
LINK = "nanovllm/apps/learn/docs"
"""A link to docs, of which the package has a part."""


def test_the_changelog_begins_with_the_version():
    assert release.changelog_version() == nanovllm.__version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "nanovllm.__version__"}


def course_files():
    course = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs/course").glob("*_*/*.*")}
    return {"mini.py", *(path.as_posix() for path in course)}


@pytest.mark.long
def test_a_wheel_has_every_file_of_the_package(tmp_path):
    """Symptom: a source of the kernels or a file of the shipped model is missing when installed."""
    listed = subprocess.run(
        ["git", "ls-files", "nanovllm"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = {name for name in listed.stdout.split() if name.rpartition("/")[2] not in NOT_PACKAGED}
    files -= {LINK}
    files |= {f"{LINK}/{name}" for name in course_files()}
    tree = tmp_path / "tree"
    for name in [*files, "pyproject.toml", "README.md", "LICENSE"]:
        target = tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.hardlink_to(ROOT / name)
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir")
    command = [sys.executable, "-m", "pip", "wheel", *options, str(tmp_path), str(tree)]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"nanovllm_engine-{nanovllm.__version__}-")
    with zipfile.ZipFile(wheel) as archive:
        assert files <= {*archive.namelist()}
