"""Cuts a trainer's tensors into messages; ranks in other processes get them as bytes."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch

from nanovllm.errors import InvalidRequestError
from nanovllm.options.validation import plain_text, shown

_BYTES = 64 * 2**20
"""Of a message's tensors, if it has more than one."""

NamedTensor = tuple[str, torch.Tensor]
Item = TypeVar("Item")


class Packet(NamedTuple):
    """A tensor as bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    content: bytes

    def unpacked(self) -> NamedTensor:
        values = torch.empty(len(self.content), dtype=torch.uint8)
        if self.content:
            values = torch.frombuffer(bytearray(self.content), dtype=torch.uint8)
        return self.name, values.view(self.dtype).view(self.shape)


def packet(named: NamedTensor) -> Packet:
    """Return a tensor as bytes, in its own dtype."""
    name, tensor = named
    plain = tensor.detach().to("cpu").resolve_conj().resolve_neg()
    flat = plain.contiguous().view(-1).view(torch.uint8)
    return Packet(name, tuple(tensor.shape), tensor.dtype, flat.numpy().tobytes())


def checked(item: Any) -> NamedTensor:
    """Return `item` if it is a name with a tensor of finite numbers.

    Raises:
        InvalidRequestError: it is not.
    """
    if not (isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], str)):
        raise InvalidRequestError(
            f"update_weights takes pairs (name, tensor), not {shown(item)}: give "
            "model.named_parameters(), for instance"
        )
    name, tensor = item
    is_tensor = isinstance(tensor, torch.Tensor) and not tensor.is_meta
    if not is_tensor or tensor.layout != torch.strided or tensor.is_quantized:
        raise InvalidRequestError(
            f"update_weights: {shown(name)} must be a dense tensor with values, is {shown(tensor)}"
        )
    if tensor.is_floating_point() and not _is_finite(tensor.detach()):
        raise InvalidRequestError(
            f"update_weights: {shown(name)} has numbers that are NaN or infinite: the training has "
            "diverged"
        )
    return plain_text(name), tensor


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.itemsize == 1:  # torch cannot ask this of FP8
        tensor = tensor.float()
    return bool(tensor.isfinite().all())


def in_messages(tensors: Iterable[NamedTensor]) -> Iterator[list[Packet]]:
    """Yield `tensors` in their order, as lists of about 64 MiB.

    A tensor is copied before the next is asked for, because its owner may change or free it then.
    """
    return by_size(map(packet, tensors), lambda each: len(each.content))


def by_size(items: Iterable[Item], num_bytes: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Yield `items` in their order, in lists of at most 64 MiB; a larger item is a list alone."""
    message: list[Item] = []
    size = 0
    for item in items:
        own = num_bytes(item)
        if message and size + own > _BYTES:
            yield message
            message = []
            size = 0
        message.append(item)
        size += own
    if message:
        yield message
