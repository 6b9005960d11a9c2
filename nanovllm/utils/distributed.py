"""The tensor-parallel group of this process: the only process-wide value, set once by a worker.

Without a group the size is 1 and every operation returns its input.
"""

import dataclasses
import datetime
import logging
import os
import socket
from collections.abc import Callable, Sequence as Seq
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from nanovllm.utils.system import interface_of

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class TensorParallel:
    """The rank of this process, and the number of ranks that share each layer."""

    rank: int = 0
    size: int = 1


LOOPBACK = "127.0.0.1"
_TIMEOUT = datetime.timedelta(minutes=10)
_MAX_BYTES = 2 * 2**20
"""Largest tensor for symmetric memory."""
_ALIGNMENT = 16

_tensor_parallel = TensorParallel()
_symmetric: "SymmetricAllReduce | None" = None


def tensor_parallel() -> TensorParallel:
    """Return the rank of this process and the size of the group."""
    return _tensor_parallel


def make_store(address: str = LOOPBACK) -> TCPStore:
    """Return the store by which ranks find each other. It listens on this machine's `address`.

    By itself it would listen to every network.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as server:
        port = server.getsockname()[1]
        return TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=server.detach(),
        )


def init_tensor_parallel(
    rank: int,
    size: int,
    store_at: tuple[str, int],
    device: torch.device,
    collectives: "Collectives",
    own_address: str = LOOPBACK,
) -> None:
    """Join a group of `size` ranks.

    Args:
        store_at: the address and the port of the group's store.
        collectives: of the rank's device.
        own_address: this machine's address on the network that the ranks use.
    """
    global _tensor_parallel, _symmetric
    if own_address != LOOPBACK or collectives.names_loopback:
        interface = interface_of(own_address)
        if interface is not None:
            os.environ.setdefault(collectives.interface_variable, interface)
    store = TCPStore(*store_at, is_master=False, timeout=_TIMEOUT)
    backend = collectives.backend
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
    _tensor_parallel = TensorParallel(rank, size)
    if collectives.make_all_reduce is not None and size > 1:
        _symmetric = collectives.make_all_reduce(device)


def all_reduce(x: torch.Tensor) -> torch.Tensor:
    """Sum `x` over the ranks in place, and return it."""
    if _tensor_parallel.size > 1:
        if _symmetric is not None and _symmetric.supports(x):
            _symmetric.all_reduce(x)
        else:
            dist.all_reduce(x)
    return x


class SymmetricAllReduce:
    """All-reduce for the small tensors of a decode step: one kernel over shared GPU memory.

    The NVLink switch computes the sum if it can (multimem). Otherwise each rank reads the other's
    memory, for two ranks only: more ranks would each sum in a different order. All ranks get the
    same bits.

    Raises:
        RuntimeError: the GPUs cannot access each other's memory, or there are more than two and no
            multimem.
    """

    def __init__(self, device: torch.device) -> None:
        from torch.distributed import _symmetric_memory

        assert dist.group.WORLD is not None
        self._group = dist.group.WORLD.group_name
        self._buffer = _symmetric_memory.empty(_MAX_BYTES, dtype=torch.uint8, device=device)
        handle = _symmetric_memory.rendezvous(self._buffer, self._group)
        self._multimem = handle.multicast_ptr != 0
        if not self._multimem and handle.world_size > 2:
            raise RuntimeError(f"{handle.world_size} GPUs without multicast")

    def supports(self, x: torch.Tensor) -> bool:
        """Return whether `x` is small enough and the kernels support its dtype and layout."""
        return (
            x.device == self._buffer.device
            and x.nbytes <= _MAX_BYTES
            and x.nbytes % _ALIGNMENT == 0
            and x.dtype in (torch.bfloat16, torch.float32)
            and x.is_contiguous()
        )

    def all_reduce(self, x: torch.Tensor) -> None:
        """Sum `x`, for which `supports` is true, over the ranks in place."""
        buffer = self._buffer[: x.nbytes].view(x.dtype)
        buffer.copy_(x.view(-1))
        if self._multimem:
            torch.ops.symm_mem.multimem_all_reduce_(buffer, "sum", self._group)
            x.view(-1).copy_(buffer)
        else:
            torch.ops.symm_mem.one_shot_all_reduce_out(buffer, "sum", self._group, x.view(-1))


def make_symmetric_all_reduce(device: torch.device) -> SymmetricAllReduce | None:
    """Return a SymmetricAllReduce on every rank, or None on every rank; the log gives the reason.

    The ranks vote: a rank that used NCCL while the others do not would deadlock.
    """
    made = None
    reason = "another rank cannot"
    try:
        made = SymmetricAllReduce(device)
    except Exception as error:  # torch and the driver raise many types; NCCL is the fallback
        reason = f"{type(error).__name__}: {error}"
    votes = torch.tensor([made is not None], dtype=torch.int32, device=device)
    dist.all_reduce(votes, dist.ReduceOp.MIN)
    agreed = bool(votes.item())
    if agreed:
        logger.info("all-reduce of up to %d bytes by symmetric memory", _MAX_BYTES)
    else:
        logger.info("all-reduce by NCCL alone; symmetric memory: %s", reason)
    return made if agreed else None


class Collectives(NamedTuple):
    """How the ranks of a kind of device exchange tensors."""

    backend: str  # torch.distributed's name for it
    interface_variable: str  # the environment variable that names the network interface for it
    # Whether it needs the name of the loopback's, too. gloo would look up this machine's name,
    # which is often another network's.
    names_loopback: bool = False
    # Makes what sums small tensors faster, on every rank or on none.
    make_all_reduce: Callable[[torch.device], SymmetricAllReduce | None] | None = None


GLOO = Collectives("gloo", "GLOO_SOCKET_IFNAME", names_loopback=True)
NCCL = Collectives("nccl", "NCCL_SOCKET_IFNAME", make_all_reduce=make_symmetric_all_reduce)


def gather_to_first(x: torch.Tensor) -> torch.Tensor | None:
    """Return the ranks' `x` concatenated along the last dimension on rank 0, None on the others."""
    if _tensor_parallel.size == 1:
        return x
    first = _tensor_parallel.rank == 0
    parts = [torch.empty_like(x) for _ in range(_tensor_parallel.size)] if first else None
    dist.gather(x, parts, dst=0)
    return torch.cat(parts, dim=-1) if parts else None


def broadcast_from_first(x: torch.Tensor) -> torch.Tensor:
    """Overwrite `x` with the `x` of rank 0, and return it."""
    if _tensor_parallel.size > 1:
        dist.broadcast(x, src=0)
    return x


def smallest(values: Seq[int], device: torch.device) -> list[int]:
    """Return, for each of `values`, the smallest of the ranks'. All ranks call it, with as many."""
    if _tensor_parallel.size == 1 or not values:
        return list(values)
    found = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MIN)
    numbers: list[int] = found.tolist()
    return numbers
