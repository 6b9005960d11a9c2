"""A driver for Triton that runs the compiled kernels of an absent GPU on the CPU: it executes their
PTX with numpy. `install` it in a process without TRITON_INTERPRET.

It finds wrong results, accesses outside of the arguments' memory, unaligned ones, threads that wait
at different barriers, and stores of a chained kernel before its wait. It does not show what ptxas
does, which barriers and waits are missing, in which order programs see the stores of one another,
and how long anything takes.
"""

import functools
import itertools
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from tests.kernels.triton.harness import SHARED
from tests.kernels.triton.simulator.instructions import translate
from tests.kernels.triton.simulator.machine import Machine, Step
from tests.kernels.triton.simulator.memory import GlobalMemory
from tests.kernels.triton.simulator.parser import Kernel, parse

_MAX_THREADS = 2**15
"""Threads that run in step. More are slower, because their registers leave the caches."""


def install(arch: int) -> None:
    """Let Triton compile for compute capability `arch`, such as 90, and run what it compiles."""
    driver.set_active(_Driver(arch))


class _Driver:
    """What Triton asks of a driver."""

    def __init__(self, arch: int) -> None:
        self._arch = arch
        self.utils = _Utils(SHARED[arch] * 1024)
        self.launcher_cls = _Launcher
        knobs.runtime.kernel_load_start_hook.add(self.utils.note_files)

    def get_current_device(self) -> str:
        return f"simulated-{self._arch}"  # the key of Triton's cache of compiled kernels

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)


class _Utils:
    """Loads kernels. Triton gives the machine code only, and before that a list of its files."""

    def __init__(self, max_shared: int) -> None:
        self._max_shared = max_shared
        self._ptx = ""

    def note_files(self, module: Any, function: Any, name: str, files: Any, hash: str) -> None:
        self._ptx = next(path for path in files.values() if path.endswith(".ptx"))

    def load_binary(self, name: str, code: bytes, shared: int, device: str) -> tuple[Any, ...]:
        function = Path(self._ptx).read_text(encoding="utf-8"), shared
        return None, function, 0, 0, 1024  # module, function, registers, spills, most threads

    def get_device_properties(self, device: str) -> dict[str, int]:
        return {"max_shared_mem": self._max_shared, "multiprocessor_count": 132}


class _Launcher:
    """Launches the kernel that was compiled from `src`."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self._types = tuple(src.signature.values())

    def __call__(self, *args: Any) -> None:
        # Between function and arguments: packed metadata, and hooks.
        (*grid, _, function), values = args[:5], args[9:]
        launch(*function, (grid[0], grid[1], grid[2]), list(_arguments(values, self._types)))


def _arguments(values: tuple[Any, ...], types: tuple[Any, ...]) -> Iterator[tuple[Any, str]]:
    """Yield the arguments that the compiled kernel takes, with Triton's names of their types."""
    for value, type in zip(values, types, strict=True):
        if isinstance(type, tuple):
            yield from _arguments(value, type)
        elif type != "constexpr":
            yield value, type


def launch(
    ptx: str, shared_bytes: int, grid: tuple[int, int, int], arguments: list[tuple[Any, str]]
) -> None:
    """Run a kernel for all programs of `grid`.

    Args:
        shared_bytes: shared memory of a program.
        arguments: each with its type, such as "*bf16" (a tensor), "i32" or "fp32".

    Raises:
        KernelError: the kernel does what a GPU does not allow.
        NotImplementedError: it has an instruction that is not known here.
    """
    kernel, steps = _load(ptx)
    storages = [x.untyped_storage() for x, type in arguments if type.startswith("*")]
    memory = GlobalMemory([(x.data_ptr(), x.nbytes()) for x in storages])
    parameters = [_bits(*argument) for argument in arguments] + [0, 0]  # two for scratch memory
    # Numbers of programs, the first dimension innermost.
    numbers = itertools.product(*map(range, reversed(grid)))
    programs = np.array([number[::-1] for number in numbers])
    at_once = max(_MAX_THREADS // kernel.num_threads, 1)
    with np.errstate(all="ignore"):
        for first in range(0, len(programs), at_once):
            part = programs[first : first + at_once]
            Machine(kernel, steps, parameters, part, grid, shared_bytes, memory).run()


@functools.cache
def _load(ptx: str) -> tuple[Kernel, list[Step]]:
    kernel = parse(ptx)
    return kernel, translate(kernel)


def _bits(value: Any, type: str) -> int:
    if type.startswith("*"):
        return int(value.data_ptr())
    if type in ("fp32", "fp64"):
        code = "f" if type == "fp32" else "d"
        return int.from_bytes(struct.pack(f"<{code}", value), "little")
    return int(value)
