"""How many KV blocks fit into memory.

What other processes hold counts only as memory that is not free.
"""

import contextlib
import itertools
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence as Seq

from nanovllm.core.worker_info import WorkerInfo, pages_for
from nanovllm.errors import OutOfMemoryError, refuses_memory
from nanovllm.options.config import Config
from nanovllm.platform import Platform

logger = logging.getLogger(__name__)


def num_blocks_that_fit(
    config: Config,
    platform: Platform,
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
        warm_up: see `Platform.pool_bytes`.
        num_reserved: blocks that the rank allocates in addition, for padding.
    """
    if config.num_kvcache_blocks != -1:
        return config.num_kvcache_blocks
    if config.kv_cache_memory_bytes is not None:
        budget = config.kv_cache_memory_bytes
    else:
        limits = config.gpu_memory_utilization, config.tensor_parallel_size
        budget = platform.pool_bytes(*limits, warm_up)
    blocks = min(max(max(budget, 0) // block_bytes - num_reserved, 0), max_blocks)
    logger.info(
        "KV pool: %d blocks of %d bytes (%.2f GiB)",
        blocks,
        block_bytes,
        blocks * block_bytes / 2**30,
    )
    return blocks


def graph_bytes(sizes: Seq[int], capture: Callable[[int], None], platform: Platform) -> int:
    """Return an estimate of the bytes that CUDA graphs of `sizes` (ascending) will take.

    Captures the three largest graphs. The largest one allocates the memory that all share. The
    smaller growth of the next two is the cost of each further graph. The driver's memory counts as
    well, so the growth is measured on the whole GPU. If another process allocates or frees memory
    at the same time, its change is counted at most once, not once for each graph.
    """
    used = [platform.used_bytes()]
    for size in sizes[:-4:-1]:
        capture(size)
        used.append(platform.used_bytes())
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
