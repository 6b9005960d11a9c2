"""Building the C kernels, and what happens where they cannot be used.

The tests of an LLM build into this process, because importing torch anew takes seconds. The
compilers do not optimise: the variants in test_ops.py are optimised.
"""

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nanovllm import SamplingParams, demo_model
from nanovllm.kernels.cpu import build
from nanovllm.kernels.cpu.library import library
from tests.helpers import ROOT
from tests.kernels.cpu.helpers import native


@pytest.fixture
def answers(tmp_path, monkeypatch, make_llm, caplog) -> Iterator[Callable[[str], str]]:
    """Return a function that builds with a compiler into an empty cache and asks a new LLM.

    The function returns "<there are kernels> <the answer is right>" and the log.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    caplog.set_level(logging.INFO)
    library.cache_clear()

    def ask(compiler: str) -> str:
        monkeypatch.setenv("CC", compiler)
        question, answer = demo_model.entries()[10]
        params = SamplingParams(temperature=0, max_tokens=128)
        llm = make_llm(demo_model.MODEL, device="cpu")
        text = llm.generate(question, params, use_tqdm=False)[0].text
        return f"{library() is not None} {text.strip() == answer}\n{caplog.text}"

    yield ask
    library.cache_clear()


def compiler_that(edit: str, tmp_path: Path, unless: str = "--version") -> str:
    """Return a compiler that does not optimise and applies `edit` (of sed) to linear.c.

    It does not apply `edit` when its arguments contain `unless`.
    """
    compiler = tmp_path / "cc"
    csrc = Path(build.__file__).with_name("csrc")
    compiler.write_text(f"""#!/bin/sh
case "$*" in --version|*{unless}*) exec gcc "$@" -O0;; esac
count=$#
for argument; do
    case "$argument" in */linear.c)
        sed '{edit}' "$argument" > {tmp_path}/linear.c
        argument={tmp_path}/linear.c;;
    esac
    set -- "$@" "$argument"
done
shift $count
exec gcc -I {csrc} "$@" -O0
""")
    compiler.chmod(0o755)
    return str(compiler)


def test_without_a_compiler_torch_serves_and_the_log_says_why(answers):
    shown = answers("/no/such/compiler")
    assert "False True" in shown
    assert shown.count("native CPU kernels are off, torch serves") == 1


@native
def test_built_once_into_a_private_cache(tmp_path, monkeypatch):
    """A second process finds the library that the first one built."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", compiler_that("", tmp_path))
    build.load()
    (built_file,) = (tmp_path / "nanovllm").iterdir()
    built = built_file.stat().st_mtime_ns
    code = "from nanovllm.kernels.cpu.library import library; print(library() is not None)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "True" in done.stdout, done.stderr
    assert [*(tmp_path / "nanovllm").iterdir()] == [built_file]
    assert built_file.stat().st_mtime_ns == built
    assert (tmp_path / "nanovllm").stat().st_mode & 0o777 == 0o700


@native
def test_a_wrong_compilation_is_found_by_the_self_test(tmp_path, answers):
    """With a compiler that breaks the code, the kernels are off and the answers are right."""
    shown = answers(compiler_that(r"s/w\[row \* k + i + 1\]/w[row * k + i]/", tmp_path))
    assert "False True" in shown
    assert "wrong products" in shown


@native
def test_a_system_that_lends_no_tiles_gets_kernels_without(tmp_path, answers):
    """Symptom: a container that refuses AMX runs on plain torch."""
    refusal = "s/^int nv_enable(void) {.*/int nv_enable(void) { return 0; }/"
    shown = answers(compiler_that(refusal, tmp_path, unless="-mno-amx-tile"))
    assert "True True" in shown
    assert len(list((tmp_path / "nanovllm").iterdir())) == 2
