"""What the tests of the C kernels share. Holds no fixture: conftest.py does."""

import functools
import subprocess
from pathlib import Path

import pytest
import torch

from nanovllm.features.quantization.integer import IntRows, IntTensor
from nanovllm.kernels.cpu import build
from nanovllm.kernels.cpu.kernels import CKernels
from nanovllm.kernels.cpu.library import library
from nanovllm.kernels.cpu.packed import PackedWeight
from nanovllm.kernels.torch_kernels import Kernels, LinearMethod

native = pytest.mark.skipif(library() is None, reason="no compiler here")


def make_int_method(weight: IntTensor, dtype: torch.dtype, kernels: Kernels) -> LinearMethod:
    """Return the method for a weight whose rows come at once."""
    rows = IntRows(len(weight.values), dtype, kernels)
    rows.store(0, weight)
    return rows.method()


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return the same normal bfloat16 numbers for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def pack(weight: torch.Tensor | IntTensor) -> LinearMethod:
    """Return a weight [n, k] in panels."""
    if isinstance(weight, IntTensor):
        return make_int_method(weight, torch.bfloat16, CKernels())
    packed = PackedWeight(*weight.shape)
    packed.store(0, weight)
    return packed


@functools.cache
def built_library() -> bytes:
    """Return the library of this processor's kernels."""
    build.load()  # puts it into the cache
    return Path(build.load()._name).read_bytes()


def compiled(directory: Path, source: str) -> bytes:
    """Return a shared library made of `source`."""
    output = directory / "compiled.so"
    command = ["gcc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(output)]
    subprocess.run(command, input=source.encode(), check=True)
    return output.read_bytes()


def fake_compiler(directory: Path, library: bytes | None = None, first: str = "") -> str:
    """Return a compiler that writes `library`, by default the right one, whatever the source is.

    It appends its arguments to `directory`/calls, and runs `first` before it compiles or links.
    """
    directory.mkdir(exist_ok=True)
    (directory / "library").write_bytes(built_library() if library is None else library)
    compiler = directory / "compiler"
    compiler.write_text(f"""#!/bin/sh
here=$(dirname "$0")
echo "$@" >> "$here/calls"
for argument; do [ "$argument" = --version ] && exit; done
{first}
while [ "$1" != -o ]; do shift; done
cp "$here/library" "$2"
""")
    compiler.chmod(0o755)
    return str(compiler)


def num_links(compiler: str) -> int:
    """Return how often a fake compiler has linked a library."""
    calls = Path(compiler).with_name("calls").read_text().splitlines()
    return sum("-shared" in call for call in calls)
