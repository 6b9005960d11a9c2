"""Weights from process to process: a trainer broadcasts them by torch's gloo, and engines receive.

What is broadcast, the control plane says: names, dtypes and shapes come by HTTP.
"""

import ipaddress
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import BroadcastOptions, ProcessGroupGloo

from nanovllm.errors import InvalidRequestError, TransferError
from nanovllm.features.training.packets import NamedTensor, by_size
from nanovllm.features.training.rank_weights import NewTensor
from nanovllm.options.validation import did_you_mean, shown

PREFIX = "nanovllm-weights"
"""Of the group's keys in the store."""
_POLL_SECONDS = 0.02
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
    )
}


class TransferGroup:
    """A trainer, which is rank 0, and engines. It is none of torch's groups by name.

    Args:
        address: of the machine of rank 0, as the others reach it.
        port: of the store that rank 0 has there; 0 at rank 0 takes a free one.
        timeout: seconds to wait for the others, and for a tensor.

    Raises:
        TransferError: the store cannot be reached in time.
    """

    def __init__(self, address: str, port: int, rank: int, world_size: int, timeout: float) -> None:
        self.rank = rank
        self._world_size = world_size
        self._address = address
        self._timeout = timedelta(seconds=timeout)
        self._group: Any = None  # a ProcessGroupGloo, of which torch's types know little
        try:
            self._store = self._lead(port) if rank == 0 else self._reach(port)
        except (OSError, RuntimeError, ValueError) as error:  # ValueError: no name of a machine
            raise TransferError(
                f"the trainer's store at {address:.100}:{port} cannot be reached: "
                f"{_first_line(error)}"
            ) from error

    def _lead(self, port: int) -> TCPStore:
        """Return a store at this address alone; torch's own would listen at all."""
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        with socket.socket(family) as listener:
            listener.bind((self._address, port))
            listener.listen()
            self.port: int = listener.getsockname()[1]
            return TCPStore(
                self._address,
                self.port,
                self._world_size,
                is_master=True,
                timeout=self._timeout,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )

    def _reach(self, port: int) -> TCPStore:
        with socket.create_connection((self._address, port), self._timeout.total_seconds()):
            pass  # torch says at length what it cannot reach
        self.port = port
        return TCPStore(
            self._address, port, self._world_size, is_master=False, timeout=self._timeout
        )

    def join(self, check: Callable[[], object] = lambda: None) -> None:
        """Connect all ranks.

        Args:
            check: called while rank 0 waits for the others; may raise.

        Raises:
            TransferError: another rank did not come in time.
        """
        deadline = time.monotonic() + self._timeout.total_seconds()
        store = PrefixStore(PREFIX, self._store)
        store.set(f"here/{self.rank}", "")
        others = [f"here/{rank}" for rank in range(1, self._world_size)]
        while self.rank == 0 and not store.check(others) and time.monotonic() < deadline:
            check()
            time.sleep(_POLL_SECONDS)
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._timeout = self._timeout
        if _is_loopback(self._address):  # the name of this machine may have another address
            options._devices = [gloo.create_device(hostname=self._address)]
        else:
            options._devices = [gloo.create_default_device()]
        try:
            self._group = gloo(store, self.rank, self._world_size, options)
        except RuntimeError as error:
            raise TransferError(
                f"the ranks of the transfer did not meet within {self._timeout.total_seconds():g} "
                f"s: {_first_line(error)}"
            ) from error

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send a contiguous tensor of the CPU from rank 0, or fill it at another rank.

        Raises:
            TransferError: the other end has gone, or is too slow.
        """
        if self._group is None:
            raise TransferError("the transfer of weights has ended: begin another one")
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = self._timeout
        if not tensor.numel():
            return
        try:
            self._group.broadcast([tensor.view(-1).view(torch.uint8)], options).wait()
        except RuntimeError as error:
            raise TransferError(
                f"the other end of the transfer has gone: {_first_line(error)}"
            ) from error

    def receive(self, infos: Iterable[NewTensor]) -> list[NamedTensor]:
        """Return the tensors that rank 0 broadcasts next.

        Raises:
            TransferError: as for `broadcast`.
        """
        found = []
        for info in infos:
            tensor = torch.empty(info.shape, dtype=info.dtype)
            self.broadcast(tensor)
            found.append((info.name, tensor))
        return found

    def close(self) -> None:
        """Leave the group; those who wait for this rank get an error."""
        group, self._group = self._group, None
        if group is not None:
            group.shutdown()


def tensor_infos(
    names: list[str], dtype_names: list[str], shapes: list[list[int]]
) -> list[NewTensor]:
    """Return what is told of tensors before they come.

    Raises:
        InvalidRequestError: the lists have different lengths, or a dtype or a shape is wrong.
    """
    if not len(names) == len(dtype_names) == len(shapes):
        raise InvalidRequestError(
            f"names, dtype_names and shapes must have the same length, got {len(names)}, "
            f"{len(dtype_names)} and {len(shapes)}"
        )
    found = []
    for name, dtype, shape in zip(names, dtype_names, shapes, strict=True):
        if dtype not in _DTYPES:
            raise InvalidRequestError(
                f"dtype_names: {shown(dtype)} must be one of {', '.join(_DTYPES)}"
                f"{did_you_mean(dtype, _DTYPES)}"
            )
        if any(size < 0 for size in shape):
            raise InvalidRequestError(f"shapes: {shape} of {shown(name)} has a negative size")
        found.append(NewTensor(name, tuple(shape), _DTYPES[dtype]))
    return found


def in_chunks(infos: Iterable[NewTensor]) -> Iterator[list[NewTensor]]:
    """Yield tensors in their order, in lists of about 64 MiB."""
    return by_size(infos, lambda info: torch.Size(info.shape).numel() * info.dtype.itemsize)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
