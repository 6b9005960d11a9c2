"""Takes a trainer's iterator apart into commands for an engine.

The iterator runs in the caller's thread, the commands between two steps.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence as Seq
from functools import partial
from typing import Any

from nanovllm.features.training.control import WeightControl, check_version
from nanovllm.features.training.interruption import Command
from nanovllm.features.training.packets import NamedTensor, Packet, checked, in_messages


class Update:
    """An update, or a part of one that has begun. See `WeightMethods.update_weights`.

    Raises:
        InvalidRequestError: `version` is neither an int nor a str.
    """

    def __init__(
        self,
        control: WeightControl,
        weights: Iterable[Any] | Mapping[str, Any],
        version: int | str | None,
        mode: str,
    ) -> None:
        check_version(version)
        self._control = control
        self._version = version
        self._is_part = control.is_open
        self._start = control.start(mode, self)
        self._items: Iterable[Any] = weights.items() if isinstance(weights, Mapping) else weights
        self._is_there = isinstance(weights, Mapping | list | tuple)

    def commands(self) -> Iterator[Command]:
        """Yield the commands; each must have returned before the next is asked for.

        If the iterator or a command fails, `fail` must be called.
        """
        control = self._control
        items = self._items
        if self._is_there:
            items = [checked(item) for item in items]
            yield partial(control.check, items, not self._is_part, self._owner)
        if not self._is_part:
            yield from self._start.commands()
        for message in self._messages(map(checked, items)):
            yield partial(control.load, message, self._owner)
        if not self._is_part:
            yield partial(control.finish, self._version, self)

    def fail(self) -> None:
        """End the update, because its iterator or a command has failed."""
        self._start.fail()
        self._control.fail(self._owner)

    @property
    def _owner(self) -> "Update | None":
        return None if self._is_part else self

    def _messages(self, tensors: Iterable[NamedTensor]) -> Iterator[Seq[NamedTensor | Packet]]:
        """Yield what a command takes: one tensor, which the rank in this process copies at once; or
        about 64 MiB as bytes, for ranks in other processes.
        """
        if self._control.engine.config.runs_in_process:
            return ([each] for each in tensors)
        return in_messages(tensors)
