"""Building the C kernels, and what happens where they cannot be used."""

import os
import subprocess
import sys
from pathlib import Path

from nanovllm.kernels.cpu import build
from tests.helpers import ROOT
from tests.kernels.cpu.helpers import native


def in_subprocess(tmp_path, code, **env):
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path), **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


SHOW = """
import logging
logging.basicConfig(level=logging.INFO)
from nanovllm import LLM, SamplingParams, demo_model
from nanovllm.kernels.cpu.library import library
question, answer = demo_model.entries()[10]
params = SamplingParams(temperature=0, max_tokens=128)
text = LLM(demo_model.MODEL).generate(question, params, use_tqdm=False)[0].text
print(library() is not None, text.strip() == answer)
"""


def test_without_a_compiler_torch_serves_and_the_log_says_why(tmp_path):
    shown = in_subprocess(tmp_path, SHOW, CC="/no/such/compiler")
    assert "False True" in shown
    assert shown.count("native CPU kernels are off, torch serves") == 1


@native
def test_built_once_into_a_private_cache(tmp_path):
    for _ in range(2):
        build = "from nanovllm.kernels.cpu.library import library; print(library() is not None)"
        assert "True" in in_subprocess(tmp_path, build)
        (built_file,) = (tmp_path / "nanovllm").iterdir()
        built = built_file.stat().st_mtime_ns
    assert built_file.stat().st_mtime_ns == built
    assert (tmp_path / "nanovllm").stat().st_mode & 0o777 == 0o700


def compiler_that(edit: str, tmp_path: Path, unless: str = "--version") -> str:
    """A compiler that has `edit` (sed's) applied to linear.c, but not with the flag `unless`."""
    compiler = tmp_path / "cc"
    csrc = Path(build.__file__).with_name("csrc")
    compiler.write_text(f"""#!/bin/sh
case "$*" in --version|*{unless}*) exec gcc "$@";; esac
count=$#
for argument; do
    case "$argument" in */linear.c)
        sed '{edit}' "$argument" > {tmp_path}/linear.c
        argument={tmp_path}/linear.c;;
    esac
    set -- "$@" "$argument"
done
shift $count
exec gcc -I {csrc} "$@"
""")
    compiler.chmod(0o755)
    return str(compiler)


@native
def test_a_wrong_compilation_is_found_by_the_self_test(tmp_path):
    """A compiler that breaks the code: the kernels are off, and the answers stay right."""
    compiler = compiler_that(r"s/w\[row \* k + i + 1\]/w[row * k + i]/", tmp_path)
    shown = in_subprocess(tmp_path, SHOW, CC=compiler)
    assert "False True" in shown
    assert "wrong products" in shown


@native
def test_a_system_that_lends_no_tiles_gets_kernels_without(tmp_path):
    """Symptom: a container that refuses AMX runs on plain torch."""
    refusal = "s/^int nv_enable(void) {.*/int nv_enable(void) { return 0; }/"
    compiler = compiler_that(refusal, tmp_path, unless="-mno-amx-tile")
    shown = in_subprocess(tmp_path, SHOW, CC=compiler)
    assert "True True" in shown
    assert len(list((tmp_path / "nanovllm").iterdir())) == 2
