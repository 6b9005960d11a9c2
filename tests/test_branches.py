"""Branches can be deleted: without their folders the trunk's tests still pass."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.floors import APPS, FEATURES
from tests.helpers import ROOT, environment

TRUNK = (
    "tests/options/test_config.py",
    "tests/scheduler/test_scheduler.py",
    "tests/test_generation.py",
    "tests/test_invariance.py::test_outputs_do_not_depend_on_the_way[parameters-preemption]",
)
"""The way from prompt to text, with the checks of what users set."""

NO_CHECKOUT = """
import sys

sys.meta_path[:] = [f for f in sys.meta_path if not f.__module__.startswith("__editable__")]
"""
"""Run at the start of each Python: hides the source tree that an editable install would show."""


def test_the_trunk_works_without_its_branches(tmp_path: Path) -> None:
    """In a copy of the tree without features, applications and their tests.

    The one that an engine has by default, `graphs`, is turned off by an option.
    """
    # What is compiled is copied, too, but for files that other tests write just now.
    unwanted = shutil.ignore_patterns("*.pyc.*", *FEATURES, *APPS)
    for folder in ("nanovllm", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=unwanted)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    config = tmp_path / "nanovllm/options/config.py"
    default = "    enforce_eager: bool = False\n"
    assert default in config.read_text()
    config.write_text(config.read_text().replace(default, default.replace("False", "True")))
    (tmp_path / "sitecustomize.py").write_text(NO_CHECKOUT)
    options = ("-x", "-n", "0", "-p", "no:cacheprovider", "-k", "not defaults_equal_nano_vllms")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *TRUNK],
        cwd=tmp_path,
        env=environment(PYTHONPATH=str(tmp_path)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]


WITHOUT_ONE = """
import os, sys

import llguidance
from nanovllm import LLM, SamplingParams, demo_model
from nanovllm.chat import templates
from nanovllm.kernels.cpu.library import library
from nanovllm.parallel import in_process
from nanovllm.worker import model_runner

library()
assert not [name for name in sys.modules if name.startswith("nanovllm.features.")]
trace, *features = sys.argv[1:]
for absent in features:
    if os.fork() == 0:
        break
    if os.wait()[1]:
        sys.exit(f"without {absent} it fails")
else:
    sys.exit()
sys.modules[f"nanovllm.features.{absent}"] = None  # an import of it, or from it, fails

OPTIONS = {
    "quantization": {"quantization": "int8"},
    "lora": {"enable_lora": True},
    "observe": {"trace_file": f"{trace} {absent}"},
    "speculation": {"speculative_config": {"method": "ngram"}},
    "tiers": {"kv_offload_gib": 0.02},
}
OPTIONS.pop(absent, None)
options = {name: value for option in OPTIONS.values() for name, value in option.items()}
llm = LLM(demo_model.MODEL, max_model_len=128, enforce_eager=absent == "graphs", **options)
params = SamplingParams(max_tokens=8, structured_outputs={"regex": "[a-z]{4}"})
if absent == "structured":
    params = SamplingParams(max_tokens=8)
if absent != "training":
    llm.sleep()
    llm.wake_up()
print(absent, len(llm.generate(["A cache", "A block"], params, use_tqdm=False)), flush=True)
llm.shutdown()
os._exit(0)  # the end of an interpreter takes longer than all before
"""
"""Makes engines that have all features but one, each in a process without any feature."""


def test_an_engine_has_all_features_but_one(tmp_path: Path) -> None:
    """No feature needs another. Symptom: with one folder deleted, an import elsewhere fails."""
    pytest.importorskip("llguidance")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_ONE, str(tmp_path / "trace"), *FEATURES],
        cwd=ROOT,
        env=environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == [f"{name} 2" for name in FEATURES], done.stderr[-4000:]
