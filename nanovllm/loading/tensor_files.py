"""The files of weights: what their headers say, and parts of their tensors. Nothing is mapped for
longer than a part is used: pages of a mapped file count as this process's memory.

Hazard: a process that touches a page behind the end of a file, which has become shorter since it
was mapped, is ended. So only a start maps files, for its speed; an engine that runs reads them.
"""

import contextlib
import math
import mmap
import os
import sys
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from nanovllm.errors import CheckpointError
from nanovllm.loading.files import MAX_JSON_BYTES, is_gguf, parse_object, refuse_pointer

if TYPE_CHECKING:
    from nanovllm.loading.gguf_family import GgufWeight

TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,  # the bits of exponents
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
"""What is read, by safetensors' names."""
_COMPARED = 2**19
"""Numbers of two tensors that are compared at once: they fit into a processor's cache."""


class TensorInfo(NamedTuple):
    """What a file's header says of one tensor."""

    shape: tuple[int, ...]
    dtype: str  # in safetensors' names, or a GGUF file's type
    # Of the bytes of a GGUF tensor, in which a uint8 parameter takes it.
    blocks_shape: tuple[int, ...] | None = None
    # Whether these bytes can be had in the order of the model's rows and columns.
    has_blocks: bool = True
    offset: int = 0  # of its first byte in the file


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Return what the header of `file`, safetensors or GGUF, says of each tensor, by name.

    Raises:
        CheckpointError: the file is not sound or a Git LFS pointer, or names a tensor twice.
    """
    if is_gguf(file):
        from nanovllm.loading.gguf import read_gguf

        return {
            name: TensorInfo(
                weight.shape,
                weight.tensor.type.name,
                weight.blocks_shape,
                weight.has_blocks,
                weight.tensor.offset,
            )
            for name, weight in read_gguf(file).weights.items()
        }
    try:
        with file.open("rb") as opened:
            refuse_pointer(file, opened.read(64))
            opened.seek(0)
            num_bytes = int.from_bytes(opened.read(8), "little")
            if num_bytes > MAX_JSON_BYTES:
                raise OSError(f"its header has {num_bytes} bytes; at most {MAX_JSON_BYTES}")
            text = opened.read(num_bytes)
            size = opened.seek(0, os.SEEK_END)
        names = _checked_names(file, num_bytes.to_bytes(8, "little") + text, size)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is not a sound safetensors file ({error!s:.200}); download it again"
        ) from error
    # safetensors takes the last tensor of a name; this finds a second one.
    header = parse_object(text, f"the header of {file}")
    start = 8 + num_bytes
    return {
        name: TensorInfo(
            tuple(header[name]["shape"]),
            header[name]["dtype"],
            offset=start + header[name]["data_offsets"][0],
        )
        for name in names
    }


def _nameless_file() -> IO[bytes]:
    if sys.platform != "linux":
        return TemporaryFile()
    return open(os.memfd_create("header"), "wb")


def _checked_names(file: Path, header: bytes, size: int) -> list[str]:
    """Return the names in the header of a safetensors file of `size` bytes, in the order of the
    tensors. safetensors checks every entry; it maps a file, so it gets one of this process's own,
    except on Windows, where nobody can shorten a mapped file.
    """
    if sys.platform == "win32":
        with safe_open(str(file), framework="np") as tensors:
            return list(tensors.offset_keys())
    with _nameless_file() as copy:
        copy.write(header)
        copy.truncate(size)
        with safe_open(f"/dev/fd/{copy.fileno()}", framework="np") as tensors:
            return list(tensors.offset_keys())


def equal_tensors(one: tuple[Path, str], other: tuple[Path, str]) -> bool:
    """Return whether two tensors, each named by its file and its name there, have the same shape,
    dtype and values. Reads no more than it takes to find a difference.

    Raises:
        CheckpointError: a file is not sound.
    """
    headers = [read_header(file) for file, _ in (one, other)]
    infos = [header[name] for header, (_, name) in zip(headers, (one, other), strict=True)]
    shape, dtype, *_ = infos[0]
    if (shape, dtype) != infos[1][:2] or dtype not in TORCH_DTYPES or not shape:
        return False
    num_rows = max(1, _COMPARED // max(1, math.prod(shape[1:])))
    with contextlib.ExitStack() as opened:
        files = [
            opened.enter_context(contextlib.closing(TensorFile(file, header)))
            for header, (file, _) in zip(headers, (one, other), strict=True)
        ]
        for row in range(0, shape[0], num_rows):
            slices = tuple(slice(0, size) for size in shape)
            slices = (slice(row, min(row + num_rows, shape[0])), *slices[1:])
            first, second = (
                tensors.read(name, slices, raw=False)
                for tensors, (_, name) in zip(files, (one, other), strict=True)
            )
            if not torch.equal(first.view(torch.uint8), second.view(torch.uint8)):
                return False
    return True


class TensorFile:
    """A file of weights with the header that `read_header` returned, open until `close`.

    Args:
        maps: have pages of a safetensors file in place of copies; see the hazard above.
    """

    def __init__(self, file: Path, header: dict[str, TensorInfo], *, maps: bool = False) -> None:
        self._maps = maps
        self._file = file
        self._header = header
        self._weights: dict[str, GgufWeight] = {}
        self._opened = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        if is_gguf(file):
            from nanovllm.loading.gguf import read_gguf

            self._weights = dict(read_gguf(file).weights)
        else:
            self._opened = file.open("rb")

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()

    def read(self, name: str, slices: tuple[slice, ...], *, raw: bool) -> torch.Tensor:
        """Return a part of tensor `name`, in memory that the next call may use again.

        Args:
            slices: with a start and a stop for each dimension. The first is kept, even if its
                length is 1. A tensor of one number is returned whole.
            raw: of a GGUF file: return the blocks' bytes.

        Raises:
            CheckpointError: the file ends before.
        """
        if self._opened is None:
            from nanovllm.loading.gguf import read_rows

            rows, *columns = slices
            values: Any = read_rows(self._file, self._weights[name], rows, raw=raw)
            return torch.from_numpy(values[(slice(None), *columns)])
        info = self._header[name]
        dtype = TORCH_DTYPES[info.dtype]
        if math.prod(info.shape) == 1:
            return self._bytes(name, info.offset, dtype.itemsize).view(dtype).view(info.shape)
        first, *others = slices
        row_bytes = math.prod(info.shape[1:]) * dtype.itemsize
        start = info.offset + first.start * row_bytes
        shape = info.shape[1:]
        if first.stop - first.start == 1 and others:  # one expert of a tensor: some of its rows
            second = others[0]
            row_bytes //= max(1, shape[0])
            start += second.start * row_bytes
            size = second.stop - second.start
            found = self._bytes(name, start, size * row_bytes).view(dtype)
            return found.view(1, size, *shape[1:])[(slice(None), slice(None), *others[1:])]
        size = first.stop - first.start
        found = self._bytes(name, start, size * row_bytes).view(dtype)
        return found.view(size, *shape)[(slice(None), *others)]

    def _bytes(self, name: str, offset: int, size: int) -> torch.Tensor:
        """Return `size` bytes of tensor `name` from `offset` of the file on."""
        assert self._opened is not None
        ends = CheckpointError(f"{self._file} ends within tensor {name}; download it again")
        if self._maps:
            start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
            length = offset - start + size
            file = self._opened.fileno()
            try:  # a copy is what a write would make of a page: torch has no tensors that forbid it
                pages = mmap.mmap(file, length, access=mmap.ACCESS_COPY, offset=start)
            except ValueError as error:
                raise ends from error
            return torch.frombuffer(pages, dtype=torch.uint8, offset=offset - start)
        if len(self._memory) < size:
            self._memory = torch.empty(size, dtype=torch.uint8)
        found = self._memory[:size]
        self._opened.seek(offset)
        if self._opened.readinto(found.numpy().data) < size:
            raise ends
        return found
