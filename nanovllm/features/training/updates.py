"""Takes a trainer's iterator apart into commands for an engine.

The iterator runs in the caller's thread, the commands between two steps.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence as Seq
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from nanovllm.errors import CheckpointError, InvalidRequestError
from nanovllm.features.training.control import Command, WeightControl, check_version
from nanovllm.features.training.packets import NamedTensor, Packet, checked, in_messages
from nanovllm.features.training.rank_weights import NewTensor
from nanovllm.loading.hub import safetensors_files
from nanovllm.loading.tensor_files import TORCH_DTYPES, TensorFile, read_header
from nanovllm.options.validation import shown


class SafetensorsFolder:
    """The tensors of a directory's safetensors files.

    Attributes:
        infos: what the headers say of the tensors.

    Raises:
        InvalidRequestError: there is no such directory, it has no such files, or they are not
            sound, or have numbers of an unknown type.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        try:
            files = safetensors_files(Path(directory))
            self._versions = {file: _version(file) for file in files}  # before they are read
            self._headers = {file: read_header(file) for file in files}
        except (CheckpointError, OSError, ValueError) as error:
            raise InvalidRequestError(f"update_weights: {error!s:.400}") from error
        if not files:
            raise InvalidRequestError(
                f"update_weights: {shown(os.fspath(directory))} has no safetensors files: give the "
                "directory of a checkpoint, on the machine of the engine"
            )
        self.infos = []
        for header in self._headers.values():
            for name, info in header.items():
                if info.dtype not in TORCH_DTYPES:
                    raise InvalidRequestError(
                        f"update_weights: {shown(name)} has the type {shown(info.dtype)}; give "
                        "floating-point numbers"
                    )
                self.infos.append(NewTensor(name, info.shape, TORCH_DTYPES[info.dtype]))

    def tensors(self) -> Iterator[NamedTensor]:
        """Yield the tensors of `infos`, in that order, each in memory that the next may use again.

        Raises:
            InvalidRequestError: a file has changed since its header was read.
        """
        for file, header in self._headers.items():
            try:
                with closing(TensorFile(file, header)) as opened:
                    for name, info in header.items():
                        self._require_unchanged(file)
                        whole = tuple(slice(0, size) for size in info.shape)
                        yield name, opened.read(name, whole, raw=False)
                    self._require_unchanged(file)
            except (CheckpointError, OSError) as error:
                raise InvalidRequestError(
                    f"update_weights: {error!s:.400}; write each step to a new directory"
                ) from error

    def _require_unchanged(self, file: Path) -> None:
        if _version(file) != self._versions[file]:
            raise CheckpointError(f"{file} has changed")


def _version(file: Path) -> tuple[int, int, int]:
    """Return what tells a file from one that is written later under the same name."""
    found = file.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


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
