"""The tensor-parallel group of this process: the one process-wide value, set once by a spawned
worker.

Where it was never set, the size is 1 and every operation is the identity.
"""

import dataclasses
import datetime

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True)
class TensorParallel:
    """This process's place among the ranks that share each layer."""

    rank: int = 0
    size: int = 1


_tensor_parallel = TensorParallel()


def tensor_parallel() -> TensorParallel:
    """Return this process's rank and the group's size."""
    return _tensor_parallel


def init_tensor_parallel(rank: int, size: int, port: int, device: torch.device) -> None:
    """Join the group of `size` ranks whose store listens on local `port`."""
    global _tensor_parallel
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=_TIMEOUT)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
    _tensor_parallel = TensorParallel(rank, size)


def all_reduce(x: torch.Tensor) -> torch.Tensor:
    """Sum `x` over the ranks, in place."""
    if _tensor_parallel.size > 1:
        dist.all_reduce(x)
    return x


def gather_to_first(x: torch.Tensor) -> torch.Tensor | None:
    """Concatenate the ranks' `x` along the last dimension on rank 0; None elsewhere."""
    if _tensor_parallel.size == 1:
        return x
    first = _tensor_parallel.rank == 0
    parts = [torch.empty_like(x) for _ in range(_tensor_parallel.size)] if first else None
    dist.gather(x, parts, dst=0)
    return torch.cat(parts, dim=-1) if parts else None


def broadcast_from_first(x: torch.Tensor) -> torch.Tensor:
    """Overwrite `x` with rank 0's."""
    if _tensor_parallel.size > 1:
        dist.broadcast(x, src=0)
    return x


_TIMEOUT = datetime.timedelta(minutes=10)
