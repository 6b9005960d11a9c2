"""Compiled kernels are carried: what a file has of Triton's cache, and how they are found again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import carry

MODULE = """
#include <Python.h>
static struct PyModuleDef definition = {.m_name = "m"};
PyMODINIT_FUNC PyInit_m(void) { return PyModule_Create(&definition); }
"""


def test_what_runs_is_carried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("k.cubin", "__grp__k.json", "launcher.cpython-312.so", "k.ptx", "k.source", "m.c")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "here"))
    (tmp_path / "here" / "A").mkdir(parents=True)
    for name in names:
        (tmp_path / "here" / "A" / name).write_text(name)
    carry.pack(tmp_path / carry.FILE)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "there" / "cache"))
    assert carry.num_kernels() == 0
    carry.unpack(tmp_path / carry.FILE)
    found = {path.name: path.read_text() for path in (tmp_path / "there" / "cache" / "A").iterdir()}
    assert found == {name: name for name in names[:3]}
    assert carry.num_kernels() == 1


def test_keys_name_the_version_and_sources_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    script = f"""
from triton.runtime import build, cache
print(cache.triton_key())
for _ in range(2):
    assert build.compile_module_from_src(src={MODULE!r}, name="m").__name__ == "m"
"""
    environment = {**os.environ, **carry.variables()}
    assert environment["PYTHONPATH"] == f"{carry.HOOK}{os.pathsep}elsewhere"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{triton.__version__}-carried\n"
    (kept,) = tmp_path.glob("*/m.c")
    assert kept.read_text() == MODULE
    assert len(list(kept.parent.glob("m.*.so"))) == 1
