"""Weights from process to process: a trainer broadcasts them by torch's gloo, and engines receive.

What is broadcast, the control plane says: names, dtypes and shapes come by HTTP.
"""

import ipaddress
import socket
from collections.abc import Iterable, Iterator
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
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
    )
}


class TransferGroup:
    """The group of a trainer, which is rank 0, and engines. It is none of torch's groups by name.

    Args:
        address, port: of the trainer's store.
        rank: of this engine.
        timeout: seconds to wait for the others, and for a tensor.

    Raises:
        TransferError: the store cannot be reached, or another rank does not come, in time.
    """

    def __init__(self, address: str, port: int, rank: int, world_size: int, timeout: float) -> None:
        self._timeout = timedelta(seconds=timeout)
        try:
            with socket.create_connection((address, port), timeout):
                pass  # torch says at length what it cannot reach
            store = TCPStore(address, port, world_size, is_master=False, timeout=self._timeout)
        except (OSError, RuntimeError, ValueError) as error:  # ValueError: no name of a machine
            raise TransferError(
                f"the trainer's store at {address:.100}:{port} cannot be reached: "
                f"{_first_line(error)}"
            ) from error
        gloo: Any = ProcessGroupGloo  # of which torch's types know little
        options = gloo._Options()
        options._timeout = self._timeout
        if _is_loopback(address):  # the name of this machine may have another address
            options._devices = [gloo.create_device(hostname=address)]
        else:
            options._devices = [gloo.create_default_device()]
        try:
            self._group: Any = gloo(PrefixStore(PREFIX, store), rank, world_size, options)
        except RuntimeError as error:
            raise TransferError(
                f"the ranks of the transfer did not meet within {timeout:g} s: {_first_line(error)}"
            ) from error

    def receive(self, infos: Iterable[NewTensor]) -> list[NamedTensor]:
        """Return the tensors that the trainer broadcasts next.

        Raises:
            TransferError: the trainer has gone, or is too slow.
        """
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = self._timeout
        found = []
        for info in infos:
            tensor = torch.empty(info.shape, dtype=info.dtype)
            try:
                if tensor.numel():
                    self._group.broadcast([tensor.view(-1).view(torch.uint8)], options).wait()
            except RuntimeError as error:
                raise TransferError(
                    f"the other end of the transfer has gone: {_first_line(error)}"
                ) from error
            found.append((info.name, tensor))
        return found

    def close(self) -> None:
        """Leave the group; those who wait for this rank get an error."""
        self._group.shutdown()


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
