"""How many KV blocks fit into memory.

What other processes hold counts only as memory that is not free.
"""

import contextlib
import itertools
import logging
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence as Seq
from pathlib import Path

import torch

from nanovllm.core.windows import pages_for
from nanovllm.core.worker_info import WorkerInfo
from nanovllm.errors import OutOfMemoryError, refuses_memory
from nanovllm.options.config import Config
from nanovllm.utils.cgroup import groups
from nanovllm.utils.memory import lazy_zeros

logger = logging.getLogger(__name__)

_CPU_POOL_BYTES = 4 * 2**30
"""Maximum size of the KV pool on a CPU, unless config sets another."""


def num_blocks_that_fit(
    config: Config,
    device: torch.device,
    block_bytes: int,
    max_blocks: int,
    warm_up: Callable[[], int],
    num_reserved: int = 0,
) -> int:
    """Return the number of blocks for this rank: config's, or as many as fit into free memory.

    Args:
        block_bytes: bytes of one block, all layers of this rank together.
        max_blocks: blocks for max_num_seqs sequences of max_model_len tokens, those that have left
            a window and snapshots of states included: they stay in the prefix cache. More are
            useless.
        warm_up: runs the largest step, so that torch records its peak memory on CUDA. Returns the
            bytes that CUDA graphs will take.
        num_reserved: blocks that the rank allocates in addition, for padding.
    """
    if config.num_kvcache_blocks != -1:
        return config.num_kvcache_blocks
    if config.kv_cache_memory_bytes is not None:
        budget = config.kv_cache_memory_bytes
    elif device.type == "cuda":
        num_graph_bytes = warm_up()
        budget = _cuda_budget(config.gpu_memory_utilization, device) - num_graph_bytes
    else:
        ranks = config.tensor_parallel_size
        share = int(_memory_limit() * config.gpu_memory_utilization) // ranks - _resident_memory()
        budget = min(_CPU_POOL_BYTES, available_memory() // 2 // ranks, share)
    blocks = min(max(max(budget, 0) // block_bytes - num_reserved, 0), max_blocks)
    logger.info(
        "KV pool: %d blocks of %d bytes (%.2f GiB)",
        blocks,
        block_bytes,
        blocks * block_bytes / 2**30,
    )
    return blocks


def graph_bytes(sizes: Seq[int], capture: Callable[[int], None], device: torch.device) -> int:
    """Return an estimate of the bytes that CUDA graphs of `sizes` (ascending) will take.

    Captures the three largest graphs. The largest one allocates the memory that all share. The
    smaller growth of the next two is the cost of each further graph. The driver's memory counts as
    well, so the growth is measured on the whole GPU. If another process allocates or frees memory
    at the same time, its change is counted at most once, not once for each graph.
    """
    used = [_used_memory(device)]
    for size in sizes[:-4:-1]:
        capture(size)
        used.append(_used_memory(device))
    grown = [max(after - before, 0) for before, after in itertools.pairwise(used)]
    return sum(grown) + min(grown[1:], default=0) * (len(sizes) - len(grown))


def require_one_sequence(info: WorkerInfo) -> None:
    """Check that the pool can hold one sequence of `max_model_len` tokens.

    Raises:
        OutOfMemoryError: it cannot.
    """

    def needed(num_tokens: int) -> int:
        chunk = info.max_num_batched_tokens
        return pages_for(num_tokens, info.block_size, info.kv.windows, chunk) + info.kv.state_pages

    length = info.max_model_len
    if info.num_blocks < needed(length):
        with_state = f", {info.kv.state_pages} of them for its state" if info.kv.state_pages else ""
        room = bisect_right(range(1, length + 1), info.num_blocks, key=needed)
        lower = f"lower max_model_len to {room} or less, or " if room else ""
        raise OutOfMemoryError(
            f"the KV pool holds {info.num_blocks} blocks of {info.block_size} tokens, but one "
            f"sequence of max_model_len {length} needs {needed(length)}{with_state}; "
            f"{lower}give the pool more ("
            "gpu_memory_utilization, kv_cache_memory_bytes, num_kvcache_blocks)"
        )


@contextlib.contextmanager
def memory_errors(config: Config) -> Iterator[None]:
    """Raise OutOfMemoryError where memory is refused inside, with the options that size it."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        if isinstance(error, OutOfMemoryError) or not refuses_memory(error):
            raise
        given = ", ".join(f"{name} {getattr(config, name)}" for name in _SIZES)
        raise OutOfMemoryError(
            f"the system refuses the memory that the engine needs ({error}): lower one of {given}"
        ) from error


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros; on a CPU, a page takes memory only when it is first written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return lazy_zeros(shape, dtype)


def available_memory() -> int:
    """Return the bytes that this process can still allocate: the machine's, or fewer if its cgroup
    has a limit.
    """
    available = _meminfo_available()
    for group, (limit_name, usage_name) in itertools.product(groups("memory"), _CGROUP_FILES):
        try:
            with open(group / limit_name) as limit, open(group / usage_name) as usage:
                left = int(limit.read()) - int(usage.read())
            available = min(available, left + _page_cache(group))
        except (OSError, ValueError):  # other cgroup version, no cgroup, or "max" (no limit)
            continue
    return max(available, 0)


def _memory_limit() -> int:
    """Return the bytes of the machine, or fewer if this process's cgroup has a limit."""
    try:
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        limit = 4 * _CPU_POOL_BYTES
    for group, (limit_name, _) in itertools.product(groups("memory"), _CGROUP_FILES):
        try:
            with open(group / limit_name) as file:
                limit = min(limit, int(file.read()))
        except (OSError, ValueError):  # as in available_memory
            continue
    return limit


def _resident_memory() -> int:
    """Return the bytes that this process has in memory now; 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return 0


def _page_cache(group: Path) -> int:
    """Return the reclaimable bytes in a cgroup's usage: cached files, such as weights just read."""
    try:
        with open(group / "memory.stat") as file:
            stat = dict(line.split() for line in file)
        return int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        return 0


def _meminfo_available() -> int:
    """Return the machine's available bytes; without /proc, half of the physical memory."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (ValueError, OSError, AttributeError):
        return 2 * _CPU_POOL_BYTES


def _used_memory(device: torch.device) -> int:
    """Return the bytes in use on the whole GPU, without torch's unused cache."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def _cuda_budget(utilization: float, device: torch.device) -> int:
    """Return the bytes left for the pool: `utilization` of the GPU less this process's peak.

    It is at most what is free now, less what the largest step allocates above the present.
    """
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    current = torch.cuda.memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    budget = int(total * utilization) - peak
    return min(budget, free - (peak - current))


_SIZES = (
    "max_num_seqs",
    "max_model_len",
    "max_num_batched_tokens",
    "num_kvcache_blocks",
    "kvcache_block_size",
    "kv_cache_memory_bytes",
    "gpu_memory_utilization",
)
"""The options from which the sizes of the pool, the tables and the largest step follow."""

_CGROUP_FILES = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""What a group of version 2 calls its limit and its usage, and one of version 1."""
