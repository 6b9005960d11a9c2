"""Fixtures of the tests of the C kernels."""

import contextlib
import fcntl
import functools
import logging
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from nanovllm.kernels.cpu import build, library as library_module
from nanovllm.kernels.cpu.library import library
from tests.every_case import EVERY_CASE
from tests.kernels.cpu import served
from tests.kernels.cpu.helpers import built_library

EMULATED = Path(__file__).with_name("emulated.h")
QUICK = () if EVERY_CASE else ("-Og",)
"""-Og takes a third of the time of -O3 to compile, and less than -O1 or -O0."""
# The checksum gives each version of the header its own key in the kernels' cache.
EMULATE = (
    *("-march=haswell", "-Og", "-w", "-include", str(EMULATED)),
    f"-DEMULATED={zlib.crc32(EMULATED.read_bytes())}",
)
VARIANTS = {
    "native": ((),),
    "avx512-bf16": (("avx512_bf16",), "-march=cooperlake", *QUICK),
    "avx512": (("avx512bw",), "-march=skylake-avx512", *QUICK),
    "avx2": (("avx2", "fma"), "-march=haswell", *QUICK),
    "emulated-avx512": (("avx2", "fma"), *EMULATE),
    "emulated-avx512-bf16": (("avx2", "fma"), *EMULATE, "-DEMULATE_BF16"),
    "emulated-amx": (("avx2", "fma"), *EMULATE, "-DEMULATE_AMX"),
    "portable": ((), "-O2", *QUICK),
}
EMULATES = {
    "emulated-avx512": "avx512bw",
    "emulated-avx512-bf16": "avx512_bf16",
    "emulated-amx": "amx_bf16",
}
"""By variant: what it is for. A processor that has it runs the real instructions instead."""
ARM_COMPILER, ARM_EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64-static"
ARM_VARIANTS = {
    "neon": ("cortex-a72", "-march=armv8-a"),
    "neon-bf16": ("max", "-march=armv8.6-a"),
}
"""By variant: what the emulator emulates, and the compiler's flag."""


@pytest.fixture(scope="session")
def load(tmp_path_factory):
    """Return a function that loads a variant. Processes of pytest-xdist build each only once."""
    locks = tmp_path_factory.getbasetemp().parent

    @functools.cache
    def load_alone(name):
        with (locks / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return build.load(*VARIANTS[name][1:])

    return load_alone


@pytest.fixture(scope="session")
def serve():
    """Return a function that compiles and starts the kernels of a variant for Arm."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def start(name):
            for tool in (ARM_COMPILER, ARM_EMULATOR):
                if shutil.which(tool) is None:
                    pytest.skip(f"no {tool} here")
            processor, flag = ARM_VARIANTS[name]
            program = served.compiled([ARM_COMPILER, "-Og", "-w", "-pthread", flag])
            emulator = [ARM_EMULATOR, "-cpu", processor]
            return stack.enter_context(served.ServedKernels(program, emulator))

        yield start


def variants_here() -> list[str]:
    """Return the variants that this processor can run; of two with the same code, one."""
    flags = build.processor_flags()
    found = [
        name
        for name, (needed, *_) in VARIANTS.items()
        if flags.issuperset(needed) and EMULATES.get(name) not in flags
    ]
    is_native = "amx_bf16" not in flags and not build._choice_of_tiles()
    if is_native and "avx512-bf16" in found and not EVERY_CASE:
        found.remove("avx512-bf16")
    return found


def chosen_variants() -> list[str]:
    """Return the variants that KERNELS names, or those of this processor, its own first."""
    names = os.environ.get("KERNELS", "").split()
    known = VARIANTS | ARM_VARIANTS
    flags = build.processor_flags()
    for name in names:
        if name not in known:
            pytest.exit(f"KERNELS: {name} is none of {', '.join(known)}", 2)
        missing = set(VARIANTS.get(name, ((),))[0]) - flags
        if missing:
            pytest.exit(f"KERNELS: {name} needs a processor with {' and '.join(missing)}", 2)
    return names or variants_here()


def parameters() -> Iterator[object]:
    """Yield the variants of `kernels`: the processor's own and, for long runs, the others; or those
    that KERNELS names.
    """
    for number, name in enumerate(chosen_variants()):
        is_long = number > 0 and "KERNELS" not in os.environ
        yield pytest.param(name, marks=[pytest.mark.long] if is_long else [])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let each case have the processor's variant, and one of the others. Together they have all."""
    if "KERNELS" in os.environ:
        return
    _, *others = variants_here()

    def is_kept(item: pytest.Item) -> bool:
        name = item.callspec.params.get("kernels") if hasattr(item, "callspec") else None
        if name not in others or item.path.stem == "test_variants":
            return True
        case = item.nodeid.replace(name, "").encode()
        return zlib.crc32(case) % len(others) == others.index(name)

    items[:] = filter(is_kept, items)


@pytest.fixture(params=parameters())
def kernels(request, load, serve, monkeypatch):
    """Use the kernels built for each kind of processor that can be tested here.

    Emulated ones have two threads, whatever torch has.
    """
    is_emulated = request.param in ARM_VARIANTS
    chosen = (serve if is_emulated else load)(request.param)
    monkeypatch.setattr(library_module, "library", lambda: chosen)
    before = torch.get_num_threads()
    if is_emulated:
        torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def cache(tmp_path, monkeypatch, caplog) -> Iterator[Path]:
    """An empty cache of compiled kernels for this test, not yet made. No kernels are loaded yet."""
    built_library()  # out of the usual cache
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    caplog.set_level(logging.INFO)
    library.cache_clear()
    yield tmp_path / "cache" / "nanovllm"
    library.cache_clear()


@pytest.fixture
def warnings(caplog) -> Callable[[], list[str]]:
    """Return a function that lists the warnings in the log, but for the line before a compile."""
    return lambda: [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and build.COMPILING not in record.getMessage()
    ]
