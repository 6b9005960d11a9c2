"""The CPU: C kernels, memory that the system gives when it is first written, and its limits."""

import contextlib
import itertools
import platform
from array import array
from collections.abc import Callable, Iterator, Sequence as Seq
from pathlib import Path
from typing import Any, ClassVar

import torch

from nanovllm.attention.backend import Backend
from nanovllm.kernels.cpu.build import processor_flags, processor_name
from nanovllm.kernels.cpu.kernels import CKernels, CSamplingKernels, OneDnnKernels
from nanovllm.kernels.cpu.library import library
from nanovllm.kernels.torch_kernels import TORCH, Kernels
from nanovllm.platform import Platform
from nanovllm.utils.memory import keep_freed, lazy_zeros
from nanovllm.utils.process import control_groups
from nanovllm.utils.system import free_memory, physical_memory, resident_memory

_POOL_BYTES = 4 * 2**30  # maximum size of the KV pool, unless config sets another
_CGROUP_FILES = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""What a group of version 2 calls its limit and its usage, and one of version 1."""
_CPU = torch.device("cpu")


class CPU(Platform):
    """The cores and the memory of this machine, which ranks share."""

    in_host_memory: ClassVar[bool] = True
    computes_float16: ClassVar[bool] = False
    default_num_batched_tokens: ClassVar[int] = 1024  # larger steps do not make a token cheaper

    def __init__(self, device: torch.device = _CPU, asked: str = "auto") -> None:
        super().__init__(device, asked)
        keep_freed()  # what is freed with one weight, and with each step, serves the next

    @classmethod
    def find(cls, asked: str, rank: int, num_ranks: int) -> torch.device:
        return _CPU

    def fingerprint(self) -> dict[str, Any]:
        """See `Platform`. torch's libraries choose blocks by the size of the processor's caches."""
        return {
            "machine": platform.machine(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "flags": sorted(processor_flags()),
            "name": processor_name() or platform.processor(),
        }

    def kernels(self, dtype: torch.dtype, *, native: bool = True) -> Kernels:
        if not native:
            return TORCH
        if library() is None:
            return OneDnnKernels()
        return CKernels() if dtype == torch.bfloat16 else CSamplingKernels()

    def attention_backends(self, kernels: Kernels) -> Iterator[type[Backend]]:
        if kernels.name == "c":
            from nanovllm.attention.cpu import CPUBackend

            yield CPUBackend
        yield from super().attention_backends(kernels)

    def pool_bytes(self, utilization: float, num_ranks: int, warm_up: Callable[[], int]) -> int:
        share = int(memory_limit() * utilization) // num_ranks - resident_memory()
        return min(_POOL_BYTES, available_memory() // 2 // num_ranks, share)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return lazy_zeros(shape, dtype)

    def upload(self, values: Seq[int]) -> torch.Tensor:
        if not values:
            return torch.empty(0, dtype=torch.int64)
        return torch.frombuffer(array("q", values), dtype=torch.int64)


def available_memory() -> int:
    """Return the bytes that this process can still allocate: the machine's, or fewer if its cgroup
    has a limit.
    """
    available = free_memory()
    for group, (limit_name, usage_name) in itertools.product(
        control_groups("memory"), _CGROUP_FILES
    ):
        try:
            left = _number(group / limit_name) - _number(group / usage_name)
            available = min(available, left + _page_cache(group))
        except (OSError, ValueError):  # other cgroup version, no cgroup, or "max" (no limit)
            continue
    return max(available, 0)


def memory_limit() -> int:
    """Return the bytes of the machine, or fewer if this process's cgroup has a limit."""
    limit = physical_memory()
    for group, (limit_name, _) in itertools.product(control_groups("memory"), _CGROUP_FILES):
        with contextlib.suppress(OSError, ValueError):  # as in available_memory
            limit = min(limit, _number(group / limit_name))
    return limit


def _number(file: Path) -> int:
    return int(file.read_text(encoding="utf-8"))


def _page_cache(group: Path) -> int:
    """Return the reclaimable bytes in a cgroup's usage: cached files, such as weights just read."""
    try:
        text = (group / "memory.stat").read_text(encoding="utf-8")
        stat = dict(line.split() for line in text.splitlines())
        return int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        return 0
