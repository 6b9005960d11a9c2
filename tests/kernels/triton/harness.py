"""Compiles Triton kernels for GPUs that are not here, and reads what they take of one.

The work is done in a child process without TRITON_INTERPRET, because a kernel is either
interpreted or compiled for the whole life of a process.
"""

import functools
import multiprocessing
import os
import re
import subprocess
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

ARCHS = (80, 90, 100)
"""Ampere, Hopper and Blackwell, by compute capability."""


class Resources(NamedTuple):
    """What one compiled kernel takes."""

    name: str
    n_regs: int
    """Registers of a thread."""
    n_spills: int
    """Bytes of a thread's stack, where registers that do not fit go."""
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
        kernel: a function under @triton.jit, of a module that the child can import.
        signature: by argument, Triton's name of its type: "*bf16", "i64". Where ":16" follows, the
            pointer or number is a multiple of 16.
        constexprs: by argument, the values known at compile time.
        options: num_warps, num_stages.
    """
    place = kernel.fn.__module__, kernel.fn.__name__
    job = _child().submit(_compile, place, dict(signature), dict(constexprs), arch, options)
    return job.result()


def compile_launches(function: Callable[..., object], *args: object, arch: int) -> list[Resources]:
    """Call `function(*args)` and return the kernels that it would launch, none of which runs.

    Args:
        function: at the top of a module that the child can import.
        args: may hold tensors on the meta device, which have a shape and no memory.
    """
    return _child().submit(_compile_launches, function, args, arch).result()


@functools.cache
def _child() -> ProcessPoolExecutor:
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=spawn, initializer=_compile_kernels)


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
    return _resources(triton.compile(source, GPUTarget("cuda", arch, 32), options))


def _compile_launches(
    function: Callable[..., object], args: tuple[object, ...], arch: int
) -> list[Resources]:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class AbsentGPU:
        def get_current_device(self) -> str:
            return f"absent-{arch}"  # kernels are kept by device

        def get_current_stream(self, device: str) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", arch, 32)

    compiled = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        compiled.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    driver.set_active(AbsentGPU())
    JITFunction.run = compile_only
    try:
        function(*args)
    finally:
        JITFunction.run = run
    return [_resources(kernel) for kernel in compiled]


def _resources(compiled: Any) -> Resources:
    from triton import knobs

    tool = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage"]
    path = compiled.metadata_group[f"{compiled.name}.cubin"]
    done = subprocess.run([*tool, path], capture_output=True, text=True, check=True)
    used = {name: int(value) for name, value in re.findall(r" (\w+):(\d+)", done.stdout)}
    spilled = used["STACK"] + used["LOCAL"]
    return Resources(compiled.name, used["REG"], spilled, compiled.metadata.shared)
