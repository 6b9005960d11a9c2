"""Compiles Triton kernels for GPUs that are not present, and reads the resources they need.

The work is done in child processes without TRITON_INTERPRET, because a process either interprets
all kernels or compiles them. Nearly all of the time goes to Triton's passes, LLVM and ptxas. Triton
keeps each compiled kernel in memory and on disk.
"""

import functools
import multiprocessing
import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, NamedTuple
from unittest import mock

from tests.every_case import EVERY_CASE

ARCHS = (80, 90, 100) if EVERY_CASE else (90,)
"""Hopper; with EVERY_CASE=1 also Ampere and Blackwell. By compute capability."""
FP8_ARCHS = ARCHS[-2:]
"""Ampere has no FP8, nor an instruction that converts to it."""
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227}
"""KiB of shared memory that a program may use, by compute capability."""
_MAX_CHILDREN = 2
"""Each imports torch and triton: 2 s of CPU time, half a gigabyte."""


class Resources(NamedTuple):
    """What one compiled kernel needs."""

    name: str
    arch: int
    n_regs: int
    """Registers of a thread."""
    n_spills: int
    """Bytes of a thread's stack, which hold the registers that did not fit."""
    shared: int
    """Bytes of shared memory of a program."""


def compile_for(
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, object],
    arch: int,
    **options: int,
) -> Resources:
    """Compile one kernel.

    Args:
        kernel: a function with @triton.jit, in a module that a child can import.
        signature: Triton's type name for each argument, such as "*bf16" or "i64". The suffix ":16"
            means that the pointer or number is a multiple of 16.
        constexprs: the values of the arguments that are known at compile time.
        options: num_warps, num_stages, maxnreg.
    """
    place = kernel.fn.__module__, kernel.fn.__name__
    job = _children().submit(_compile, place, dict(signature), dict(constexprs), arch, options)
    return job.result()


def compile_launches(
    *calls: tuple[Any, ...], archs: Sequence[int] = ARCHS
) -> dict[int, list[Resources]]:
    """Return the kernels that `calls` would launch on each architecture. No kernel runs.

    Args:
        calls: (function, *arguments). The function must be at the top level of a module that a
            child can import. Tensors may be on the meta device: they have a shape and no memory.
        archs: compute capabilities.
    """
    jobs: dict[int, list[Future[list[Resources]]]] = {
        arch: [_children().submit(_compile_launches, *call, arch=arch) for call in calls]
        for arch in archs
    }
    return {
        arch: [kernel for job in of_arch for kernel in job.result()]
        for arch, of_arch in jobs.items()
    }


def count_variants(function: Callable[..., object], *args: object, arch: int = 90) -> Counter[str]:
    """Return how many variants of each kernel `function` would compile. No kernel runs.

    Triton compiles a variant for each combination of types, constants and alignments that it meets.
    So pass tensors with memory, and a function as for `compile_launches`.
    """
    return _children().submit(_count_variants, function, *args, arch=arch).result()


def relaunches(
    function: Callable[..., object], *args: object, arch: int = 90
) -> list[tuple[str, tuple[int, ...], dict[str, object]]]:
    """Return kernel, grid and arguments of each launch of an already compiled kernel.

    In place of a tensor there is its shape. No kernel runs.
    """
    return _children().submit(_relaunches, function, *args, arch=arch).result()


@functools.cache
def _children() -> ProcessPoolExecutor:
    # One per core and process of pytest-xdist. More would only cost their imports.
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    cores = (os.cpu_count() or 1) // processes
    return ProcessPoolExecutor(
        min(max(cores, 1), _MAX_CHILDREN),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_compile_kernels,
    )


def _compile_kernels() -> None:
    os.environ.pop("TRITON_INTERPRET", None)  # before the first import of triton


def _compile(
    place: tuple[str, str],
    signature: dict[str, str],
    constexprs: dict[str, object],
    arch: int,
    options: dict[str, int],
) -> Resources:
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(place[0]), place[1])
    types, attrs = {}, {}
    for index, name in enumerate(kernel.arg_names):
        types[name], _, divisor = signature.get(name, "constexpr").partition(":")
        if divisor:
            attrs[(index,)] = [["tt.divisibility", int(divisor)]]
    source = ASTSource(kernel, types, constexprs, attrs)
    return _resources(triton.compile(source, GPUTarget("cuda", arch, 32), options), arch)


def _compile_launches(function: Callable[..., object], *args: object, arch: int) -> list[Resources]:
    return [_resources(kernel, arch) for kernel in _launched(function, *args, arch=arch)]


def _count_variants(function: Callable[..., object], *args: object, arch: int) -> Counter[str]:
    variants = {id(kernel): kernel.name for kernel in _launched(function, *args, arch=arch)}
    return Counter(variants.values())


def _relaunches(function: Callable[..., object], *args: object, arch: int) -> list[Any]:
    import torch
    from triton.compiler import CompiledKernel

    found = []

    def run(self: Any) -> Callable[..., None]:
        def record(*given: Any) -> None:
            grid, values = given[:3], given[9:]  # between them: stream, handles and hooks
            shown = [tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in values]
            names = self.src.fn.arg_names
            found.append((self.name, grid, dict(zip(names, shown, strict=True))))

        return record

    fakes: dict[str, Any] = {"_init_handles": lambda self: None, "run": property(run)}
    with mock.patch.multiple(CompiledKernel, **fakes):
        _launched(function, *args, arch=arch, shown=True)
    return found


def _launched(
    function: Callable[..., object], *args: object, arch: int, shown: bool = False
) -> list[Any]:
    """Return the compiled kernel of each launch. Launches of one variant share the object.

    Args:
        shown: a launch returns the compiled kernel to `function`.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class AbsentGPU:
        def get_current_device(self) -> str:
            return f"absent-{arch}"  # the key of Triton's cache of compiled kernels

        def get_current_stream(self, device: str) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", arch, 32)

    compiled = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled.append(run(self, *args, grid=grid, warmup=True, **kwargs))
        return compiled[-1] if shown else None

    driver.set_active(AbsentGPU())
    JITFunction.run = compile_only
    try:
        function(*args)
    finally:
        JITFunction.run = run
    return compiled


def _resources(compiled: Any, arch: int) -> Resources:
    from triton import knobs

    tool = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage"]
    path = compiled.metadata_group[f"{compiled.name}.cubin"]
    done = subprocess.run([*tool, path], capture_output=True, text=True, check=True)
    used = {name: int(value) for name, value in re.findall(r" (\w+):(\d+)", done.stdout)}
    spilled = used["STACK"] + used["LOCAL"]
    return Resources(compiled.name, arch, used["REG"], spilled, compiled.metadata.shared)
