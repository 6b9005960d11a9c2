"""Takes a trainer's iterator apart into commands for an engine.

The iterator runs in the caller's thread, the commands between two steps.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence as Seq
from functools import partial
from typing import Any

from nanovllm.features.training.control import WeightControl, check_version
from nanovllm.features.training.files import SafetensorsFolder
from nanovllm.features.training.interruption import Command
from nanovllm.features.training.packets import NamedTensor, Packet, checked, in_messages
from nanovllm.features.training.rank_weights import NewTensor

Weights = Iterable[Any] | Mapping[str, Any] | str | os.PathLike[str]
"""Pairs of a name and a tensor, or the path of a directory that has files of them."""


class Update:
    """An update, or a part of one that has begun. See `WeightMethods.update_weights`.

    Raises:
        InvalidRequestError: `version` is neither an int nor a str.
    """

    def __init__(
        self, control: WeightControl, weights: Weights, version: int | str | None, mode: str
    ) -> None:
        check_version(version)
        self._control = control
        self._weights = weights
        self._version = version
        self._is_part = control.is_open
        self._start = control.start(mode, self)
        self._files: SafetensorsFolder | None = None

    def commands(self) -> Iterator[Command]:
        """Yield the commands; each must have returned before the next is asked for.

        If the iterator or a command fails, `fail` must be called.
        """
        control = self._control
        if isinstance(self._weights, str | os.PathLike):
            yield partial(self._open, self._weights)
        infos, loads = self._loads()
        if infos is not None:
            whole = not self._is_part
            every = whole and self._files is not None
            yield partial(control.check, infos, whole, every, self._owner)
        if not self._is_part:
            yield from self._start.commands()
        yield from loads
        if not self._is_part:
            yield partial(control.finish, self._version, self)

    def fail(self) -> None:
        """End the update, because its iterator or a command has failed."""
        self._start.fail()
        self._control.fail(self._owner)

    @property
    def _owner(self) -> "Update | None":
        return None if self._is_part else self

    def _open(self, directory: str | os.PathLike[str]) -> None:
        self._files = SafetensorsFolder(directory)

    def _loads(self) -> tuple[list[NewTensor] | None, Iterator[Command]]:
        """Return what is known of the tensors before they are read, and commands to load them."""
        weights = self._weights
        if isinstance(weights, str | os.PathLike):
            assert self._files is not None, "opened before"
            return self._files.infos, self._from_files(self._files)
        items = weights.items() if isinstance(weights, Mapping) else weights
        infos = None
        if isinstance(weights, Mapping | list | tuple):
            items = [checked(item) for item in items]
            infos = [NewTensor(name, tuple(x.shape), x.dtype) for name, x in items]
        messages = self._messages(map(checked, items))
        return infos, (partial(self._control.load, each, self._owner) for each in messages)

    def _from_files(self, files: SafetensorsFolder) -> Iterator[Command]:
        """Yield commands that each read a tensor, and a last one that checks the files: the
        caller's thread reads none.
        """
        tensors = files.tensors()

        def load() -> None:
            for message in self._messages([checked(next(tensors))]):
                self._control.load(message, self._owner)

        yield from (load for _ in files.infos)
        yield partial(next, tensors, None)

    def _messages(self, tensors: Iterable[NamedTensor]) -> Iterator[Seq[NamedTensor | Packet]]:
        """Yield what a command takes: one tensor, which the rank in this process copies at once; or
        about 64 MiB as bytes, for ranks in other processes.
        """
        if self._control.engine.config.runs_in_process:
            return ([each] for each in tensors)
        return in_messages(tensors)
