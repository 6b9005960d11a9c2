"""Building the C kernels, and what happens where they cannot be used.

The tests of an LLM build into this process, because importing torch anew takes seconds. The
compilers optimise little: the kernels of this processor are optimised in test_ops.py.
"""

import logging
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nanovllm import SamplingParams, demo_model
from nanovllm.kernels.cpu import build
from nanovllm.kernels.cpu.library import library
from tests.helpers import ROOT, environment, wait_until
from tests.kernels.cpu.helpers import built_library, compiled, fake_compiler, native, num_links


@pytest.fixture
def answers(tmp_path, monkeypatch, make_llm, caplog) -> Iterator[Callable[[str], str]]:
    """Return a function that builds with a compiler into an empty cache and asks a new LLM.

    The function returns "<there are kernels> <the answer is right>" and the log.
    """
    built_library()  # out of the usual cache
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    caplog.set_level(logging.INFO)
    library.cache_clear()

    def ask(compiler: str) -> str:
        monkeypatch.setenv("CC", compiler)
        question, answer = min(demo_model.entries(), key=lambda entry: len(entry[1]))
        params = SamplingParams(temperature=0, max_tokens=128)
        llm = make_llm(demo_model.MODEL, device="cpu")
        text = llm.generate(question, params, use_tqdm=False)[0].text
        return f"{library() is not None} {text.strip() == answer}\n{caplog.text}"

    yield ask
    library.cache_clear()


def compiler_that(edit: str, tmp_path: Path) -> str:
    """Return a compiler that optimises little and applies `edit` (of sed) to linear.c."""
    compiler = tmp_path / "cc"
    csrc = Path(build.__file__).with_name("csrc")
    compiler.write_text(f"""#!/bin/sh
case "$*" in --version) exec gcc "$@" -Og;; esac
count=$#
for argument; do
    case "$argument" in */linear.c)
        sed '{edit}' "$argument" > {tmp_path}/linear.c
        argument={tmp_path}/linear.c;;
    esac
    set -- "$@" "$argument"
done
shift $count
exec gcc -I {csrc} "$@" -Og
""")
    compiler.chmod(0o755)
    return str(compiler)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc here")
def test_there_are_kernels_where_there_is_a_compiler():
    """Otherwise three thousand tests are skipped, as when it takes longer than build.py lets it."""
    is_skipped, *_ = native.args
    assert not is_skipped, "a warning of nanovllm.kernels.cpu.library says why there are none"


def test_without_a_compiler_torch_serves_and_the_log_says_why(answers):
    shown = answers("/no/such/compiler")
    assert "False True" in shown
    assert shown.count("native CPU kernels are off, torch serves") == 1


@native
@pytest.mark.skipif(shutil.which("clang") is None, reason="no clang here")
def test_clang_builds_the_kernels(answers):
    """The kernels have threads of their own, so no second OpenMP comes with clang."""
    assert "True True" in answers("clang")


@native
def test_built_once_into_a_private_cache(tmp_path, monkeypatch):
    """A second process finds the library that the first one built."""
    compiler = fake_compiler(tmp_path / "compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", compiler)
    build.load()
    (built_file,) = (tmp_path / "nanovllm").glob("*.so")
    built = built_file.stat().st_mtime_ns
    code = "from nanovllm.kernels.cpu.library import library; print(library() is not None)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "True" in done.stdout, done.stderr
    assert [*(tmp_path / "nanovllm").glob("*.so")] == [built_file]
    assert built_file.stat().st_mtime_ns == built
    assert num_links(compiler) == 1
    assert (tmp_path / "nanovllm").stat().st_mode & 0o777 == 0o700


@native
def test_kernels_that_compute_nothing_are_found_by_the_self_test(tmp_path, answers):
    """The kernels are off and the answers are right; the next test has wrong products in parts."""
    idle = (
        "int nv_enable(void) { return 1; } unsigned long nv_run(void) { return 0; } "
        'char *nv_instructions(void) { return ""; }'
    )
    shown = answers(fake_compiler(tmp_path / "compiler", compiled(tmp_path, idle)))
    assert "False True" in shown
    assert "wrong products" in shown


@native
@pytest.mark.long
def test_a_wrong_compilation_is_found_by_the_self_test(tmp_path, answers):
    """With a compiler that breaks the code, the kernels are off and the answers are right."""
    shown = answers(compiler_that(r"s/panel(w + first \* k, k/panel(w, k/", tmp_path))
    assert "False True" in shown
    assert "wrong products" in shown


@native
def test_a_system_that_lends_no_tiles_gets_kernels_without(tmp_path, answers):
    """Symptom: a container that refuses AMX runs on plain torch."""
    refusing = (
        "int nv_enable(void) { return 0; } void nv_run(void) {} void nv_instructions(void) {}"
    )
    (tmp_path / "refusing").write_bytes(compiled(tmp_path, refusing))
    without_tiles = f"""case "$*" in *-mno-amx-tile*) ;; *)
    while [ "$1" != -o ]; do shift; done
    cp {tmp_path}/refusing "$2"
    exit;;
esac"""
    compiler = fake_compiler(tmp_path / "compiler", first=without_tiles)
    shown = answers(compiler)
    assert "True True" in shown
    assert len(list((tmp_path / "nanovllm").glob("*.so"))) == 2
    assert num_links(compiler) == 2


@native
@pytest.mark.skipif(platform.machine() != "x86_64", reason="no AMX here")
def test_the_compiler_knows_the_flags_that_leave_tiles_out():
    command = [*build.find_compiler(), *build._WITHOUT_TILES, "-fsyntax-only", "-xc", "/dev/null"]
    subprocess.run(command, check=True)


@native
@pytest.mark.skipif(platform.machine() != "x86_64", reason="no AMX here")
def test_products_of_bytes_are_tile_instructions(tmp_path):
    """Elsewhere the tests emulate them, and so do not compile the intrinsics."""
    source = Path(build.__file__).with_name("csrc") / "int_tiles.c"
    code = tmp_path / "int_tiles.s"
    flags = "-march=sapphirerapids", "-Og", "-S"
    subprocess.run([*build.find_compiler(), *flags, str(source), "-o", str(code)], check=True)
    assert {"tdpbssd", "tdpbusd"} <= set(code.read_text().split())


# $CC and compilers that misbehave


@native
def test_cc_is_split_as_a_shell_would(cache, tmp_path, monkeypatch):
    """Symptom: with CC="gcc -O2" the kernels were off."""
    compiler = fake_compiler(tmp_path / "the compiler")
    for number, options in enumerate(["", "-O2 -DTEXT='a b'"], start=1):
        monkeypatch.setenv("CC", f"'{compiler}' {options}")
        build.load()
        assert len([*cache.iterdir()]) == number, "the options are part of the file's name"
    calls = Path(compiler).with_name("calls").read_text()
    assert "-O2 -DTEXT=a b -O3" in calls


@native
@pytest.mark.parametrize("empty", ["", "  "])
def test_an_empty_cc_is_no_cc(monkeypatch, empty):
    monkeypatch.delenv("CC", raising=False)
    usual = build.find_compiler()
    monkeypatch.setenv("CC", empty)
    assert build.find_compiler() == usual


@native
@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("no-such-compiler -O2", "CC names 'no-such-compiler', which is no program here"),
        ("/dev/null", "CC names '/dev/null', which is no program here"),
        ("gcc 'open", "No closing quotation"),
        ("x" * 10000, "x" * 100),
        ("true", "true reports success and writes no library"),
        ("false", "false failed with 1"),
    ],
)
def test_a_cc_that_is_no_compiler_is_one_warning(cache, monkeypatch, warnings, command, reason):
    monkeypatch.setenv("CC", command)
    assert library() is None
    (warning,) = warnings()
    assert reason in warning
    assert len(warning) < 400
    assert not cache.exists() or [*cache.iterdir()] == []


@native
def test_the_log_has_the_first_lines_of_what_the_compiler_says(
    cache, tmp_path, monkeypatch, warnings
):
    """Its errors first: notes, of which there may be many, say nothing of why it failed."""
    says = "for i in $(seq 9); do echo a.c:1: note: that $i >&2; done; echo in a function >&2;"
    says += "for i in $(seq 1000); do echo a.c:2: error: line $i >&2; done; exit 3"
    monkeypatch.setenv("CC", fake_compiler(tmp_path / "compiler", first=says))
    assert library() is None
    (warning,) = warnings()
    assert "compiler failed with 3: a.c:2: error: line 1\na.c:2: error: line 2" in warning
    assert "line 6" not in warning
    assert "note" not in warning
    assert [*cache.iterdir()] == []


@native
def test_a_compiler_that_never_ends_is_ended(cache, tmp_path, monkeypatch, warnings):
    """The processes that it started end too."""
    forever = f"sleep 1000 & echo $! >> {tmp_path}/sleeping; wait"
    monkeypatch.setenv("CC", fake_compiler(tmp_path / "compiler", first=forever))
    monkeypatch.setattr(build, "_COMPILER_SECONDS", 0.5)
    assert library() is None
    (warning,) = warnings()
    assert "compiler took more than 0.5 seconds" in warning
    assert [*cache.iterdir()] == []
    sleeping = (tmp_path / "sleeping").read_text().split()
    assert sleeping
    wait_until(lambda: not any(map(running, sleeping)), 5)


@native
def test_a_compiler_ends_with_a_process_that_is_killed(tmp_path):
    """Symptom: gcc and its cc1 computed for minutes more."""
    sleeping = tmp_path / "sleeping"
    forever = f"sleep 1000 & echo $! >> {sleeping}; wait"
    compiler = fake_compiler(tmp_path / "compiler", first=forever)
    program = "from nanovllm.kernels.cpu.library import library; library()"
    caches = {"CC": compiler, "XDG_CACHE_HOME": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", program], env=environment(**caches))
    try:
        wait_until(lambda: sleeping.exists() and bool(sleeping.read_text()), 60)
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not any(map(running, sleeping.read_text().split())), 5)


def running(pid: str) -> bool:
    """Return whether a process runs. One that has ended may wait for its parent's call."""
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
