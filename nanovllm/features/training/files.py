"""`SafetensorsFolder`: new weights that lie in a directory, as `save_pretrained` writes them."""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from nanovllm.errors import CheckpointError, InvalidRequestError
from nanovllm.features.training.packets import NamedTensor
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
