"""Branches can be deleted: without their folders the trunk's tests still pass."""

import shutil
import subprocess
import sys
from pathlib import Path

from tests.floors import APPS, FEATURES
from tests.helpers import ROOT, environment

TRUNK = (
    "tests/options/test_config.py",
    "tests/scheduler/test_scheduler.py",
    "tests/engine/test_llm_engine.py",
    "tests/test_generation.py",
)
"""The way from prompt to text, with the checks of what users set."""

NO_CHECKOUT = """
import sys

sys.meta_path[:] = [f for f in sys.meta_path if not f.__module__.startswith("__editable__")]
"""
"""Run at the start of each Python: hides the source tree that an editable install would show."""


def test_the_trunk_works_without_its_branches(tmp_path: Path) -> None:
    """In a copy of the tree without the branches and their tests.

    The one that an engine has by default, `fast_steps`, is turned off by an option.
    """
    unwanted = shutil.ignore_patterns("__pycache__", *FEATURES, *APPS)
    for folder in ("nanovllm", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=unwanted)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    config = tmp_path / "nanovllm/options/config.py"
    default = "    enforce_eager: bool = False\n"
    assert default in config.read_text()
    config.write_text(config.read_text().replace(default, default.replace("False", "True")))
    (tmp_path / "sitecustomize.py").write_text(NO_CHECKOUT)
    options = (
        "-x",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "-k",
        "not tensor_parallelism and not kvcache_block_size and not defaults_equal_nano_vllms",
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *TRUNK],
        cwd=tmp_path,
        env=environment(PYTHONPATH=str(tmp_path)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
