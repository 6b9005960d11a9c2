"""Compiles the C kernels for this processor, caches the library, and tests one product.

A cached library is named by a hash of the sources, compiler, flags and processor. Knows no model.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from nanovllm.kernels.cpu.calls import pack_call

_SOURCES = sorted(Path(__file__).with_name("csrc").glob("*.[ch]"))
_COMPILE = ("-c", "-O3", "-pthread", "-fPIC")
_LINK = ("-shared", "-pthread", "-lm")
_WITHOUT_TILES = ("-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8")

PANEL = 32
"""Outputs per panel of a packed weight. In the KV cache, head_dim is padded to whole panels."""


class Unavailable(Exception):
    """The kernels cannot be used here; the message says why."""


def load(*architecture: str) -> ctypes.CDLL:
    """Return the library of kernels for this processor, after testing it.

    Args:
        architecture: compiler flags that replace -march=native.

    Raises:
        Unavailable: the kernels cannot be built, or they compute wrong products.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise Unavailable("there is no C compiler (gcc or cc)")
    flags = architecture or ("-march=native",)
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
        sources = [path.read_bytes() for path in _SOURCES]
        key = repr((sources, version, _COMPILE, _LINK, flags, sorted(processor_flags()))).encode()
        path = _cache_directory() / f"cpu-{hashlib.sha256(key).hexdigest()[:24]}.so"
        if not path.is_file():
            _compile(compiler, flags, path)
        kernels = ctypes.CDLL(str(path))
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", b"") or b""
        raise Unavailable(f"{error} {detail.decode(errors='replace')[-500:]}") from error
    if not kernels.nv_enable():  # the system refuses AMX tiles
        if _WITHOUT_TILES[0] in flags:
            raise Unavailable("the system refuses AMX tiles to kernels built without them")
        return load(*flags, *_WITHOUT_TILES)
    kernels.nv_run.argtypes = [ctypes.c_char_p, *[ctypes.c_ssize_t] * 4]
    kernels.nv_run.restype = None
    _self_test(kernels)
    return kernels


def _compile(compiler: str, flags: tuple[str, ...], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        built = Path(directory, path.name)
        objects = {s: Path(directory, f"{s.stem}.o") for s in _SOURCES if s.suffix == ".c"}
        run = functools.partial(subprocess.run, capture_output=True, check=True)
        with ThreadPoolExecutor() as pool:  # one compiler process per source
            commands = ([compiler, *_COMPILE, *flags, s, "-o", o] for s, o in objects.items())
            list(pool.map(run, commands))
        run([compiler, *objects.values(), "-o", built, *_LINK])
        os.replace(built, path)  # atomic: another process may do the same


def _cache_directory() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = Path(root, "nanovllm")
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    if hasattr(os, "getuid") and directory.stat().st_uid != os.getuid():
        raise Unavailable(f"{directory} belongs to another user")
    return directory


def processor_flags() -> frozenset[str]:
    """Return the processor's feature flags in /proc/cpuinfo, or none on other systems."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith(("flags", "Features")):  # x86, ARM
                    return frozenset(line.split(":", 1)[1].split())
    except OSError:
        pass
    return frozenset()


def _self_test(kernels: ctypes.CDLL) -> None:
    """Compare a small product with torch's, to find a miscompilation before the kernels are used.

    Raises:
        Unavailable: the product is wrong.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(70, 608, generator=generator).bfloat16()
    x = torch.randn(37, 608, generator=generator).bfloat16()
    packed = torch.empty(3, 304, PANEL, 2, dtype=torch.bfloat16)
    y = torch.empty(37, 70, dtype=torch.bfloat16)
    w, p, inputs, outputs = (tensor.data_ptr() for tensor in (weight, packed, x, y))
    calls = pack_call("nv_pack", [w, p, 70, 608])
    calls += pack_call("nv_linear", [inputs, 608, p, outputs, 37, 70, 608])
    kernels.nv_run(calls, 2, -1, -1, torch.get_num_threads())
    expected = x.double() @ weight.double().T
    error = (y.double() - expected).abs().max()
    if not error <= 0.01 * expected.abs().max():  # also true for NaN
        raise Unavailable("the compiled kernels compute wrong products")
