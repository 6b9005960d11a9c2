"""Loads safetensors or GGUF files into a model's parameters. Each rank reads its own part only.

Every tensor must match by name, shape and dtype. Knows no architecture: each module lists its
checkpoint tensors in `shards()`.
"""

import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from nanovllm.checkpoint.gguf import is_gguf, read_gguf, read_rows
from nanovllm.checkpoint.json_object import MAX_JSON_BYTES, parse_object
from nanovllm.checkpoint.shards import Shard, model_shards
from nanovllm.errors import CheckpointError
from nanovllm.options.validation import shown
from nanovllm.utils.progress import progress_bar

logger = logging.getLogger(__name__)

_MAPPED_BYTES = 128 * 2**20
"""Bytes read before a file is mapped again, which releases the pages that were read."""
_ROWS = 32
"""A chunk's rows are a multiple of it, except for a tensor's last: packed weights are cut there."""
_MAX_LISTED = 20
"""Mismatches that one error lists."""
_MAX_NAME = 200
"""Characters of a tensor's name that an error shows as they are."""
_DTYPES = ("BF16", "F16", "F32", "F64")
"""What is converted to a parameter's dtype, in safetensors' names."""
_FP8_DTYPES = ("F8_E4M3",)
"""What an FP8 parameter takes."""
_INT_DTYPES = ("I64", "I32")
"""What a table of integers takes."""

Store = Callable[[nn.Module, torch.Tensor, torch.Tensor], bool]
"""Gets a module, a part of one of its parameters, and the values that belong there. Returns whether
it has stored them; else they are copied to the parameter."""
_Keep = Callable[["_Chunk", torch.Tensor], None]


class TensorInfo(NamedTuple):
    """What a file's header says of one tensor."""

    shape: tuple[int, ...]
    dtype: str
    """In safetensors' names, or a GGUF file's type."""
    blocks_shape: tuple[int, ...] | None = None
    """Of the bytes of a GGUF tensor, in which a uint8 parameter takes it."""
    has_blocks: bool = True
    """Whether these bytes can be had in the order of the model's rows and columns."""


def load_weights(
    model: nn.Module,
    files: list[Path],
    *,
    ignored: frozenset[str] = frozenset(),
    progress: bool = True,
    on_loaded: Callable[[nn.Module], None] = lambda module: None,
    store: Store | None = None,
) -> None:
    """Fill `model` from `files`: safetensors, or one GGUF file.

    Args:
        ignored: checkpoint names that are not read, and may be present or absent.
        on_loaded: called with each module once its parameters are complete; may replace them.
        store: keeps some rows of a module's parameter elsewhere, or returns False.

    Raises:
        CheckpointError: a file is corrupt, or tensors do not match (see `check_tensors`). No
            parameter has changed.
    """
    headers = {file: read_header(file) for file in files}
    file_of = check_tensors(model, headers, ignored)
    if progress:
        _log_left_out((name for header in headers.values() for name in header), ignored)
    chunks = _plan(model, file_of, ignored)

    def keep(chunk: "_Chunk", values: torch.Tensor) -> None:
        values = chunk.fitting(values)
        if store is None or not store(chunk.owner, chunk.target, values):
            chunk.target.copy_(values)

    # Only the chunks refer to the targets: a parameter that on_loaded replaces is freed at once.
    num_unread = Counter({module: 0 for module, _ in model_shards(model)})
    num_unread.update(chunk.owner for queue in chunks.values() for chunk in queue)
    total = sum(chunk.target.nbytes for queue in chunks.values() for chunk in queue)
    with progress_bar(
        total=total, unit="B", unit_scale=True, desc="Loading weights", delay=1, shown=progress
    ) as bar:
        for file in files:
            for module, size in _read_chunks(file, chunks.pop(file, deque()), keep):
                bar.update(size)
                num_unread[module] -= 1
                if not num_unread[module]:
                    del num_unread[module]
                    on_loaded(module)
    for module in num_unread:  # nothing to read: ignored tensors, or padding only
        on_loaded(module)


def _log_left_out(names: Iterable[str], ignored: frozenset[str]) -> None:
    """Log how many tensors of each part are not loaded, such as those for pictures."""
    parts = [part for part in ignored if part.endswith(".")]
    found = Counter(part for name in names for part in parts if name.startswith(part))
    if found:
        counts = ", ".join(f"{part}* ({count} tensors)" for part, count in sorted(found.items()))
        logger.info("left out, because this network needs none of it: %s", counts)


def _plan(
    model: nn.Module, file_of: dict[str, Path], ignored: frozenset[str]
) -> dict[Path, deque["_Chunk"]]:
    chunks: dict[Path, deque[_Chunk]] = {}
    for module, shards in model_shards(model, file_of):
        for shard in shards:
            if shard.name in ignored:
                continue
            padding = shard.target.shape[shard.dim] - shard.unpadded_size
            shard.target.narrow(shard.dim, shard.unpadded_size, padding).zero_()
            chunks.setdefault(file_of[shard.name], deque()).extend(_chunks(shard, module))
    return chunks


def check_tensors(
    model: nn.Module, headers: dict[Path, dict[str, TensorInfo]], ignored: frozenset[str]
) -> dict[str, Path]:
    """Return the file that holds each tensor of `model`, which may be on torch's meta device.

    Args:
        headers: what `read_header` returns, by file.
        ignored: names that may be present or absent; one that ends in "." stands for all names
            that begin with it.

    Raises:
        CheckpointError: tensors are missing, unexpected, misshapen, in two files, or of a dtype
            that is not converted. The error lists them.
    """
    known = {name for header in headers.values() for name in header}
    shards = {
        shard.name: shard
        for _, own in model_shards(model, known)
        for shard in own
        if shard.name not in ignored
    }
    left_out = tuple(name for name in ignored if name.endswith("."))
    file_of: dict[str, Path] = {}
    wrong: list[str] = []
    for file, header in headers.items():
        for name, found in header.items():
            if name in ignored or name.startswith(left_out):
                continue
            if name in file_of:
                wrong.append(f"{_shown(name)} is in both {file_of[name].name} and {file.name}")
            else:
                wrong += _mismatch(name, found, shards.get(name))
            file_of[name] = file
    wrong += [
        f"missing {name} {shard.shape}" for name, shard in shards.items() if name not in file_of
    ]
    if wrong:
        listed = wrong[:_MAX_LISTED]
        if len(wrong) > len(listed):
            listed.append(f"and {len(wrong) - len(listed)} more")
        lines = "\n  ".join(listed)
        file = next(iter(headers))
        path, settings = (file, "its metadata") if is_gguf(file) else (file.parent, "config.json")
        raise CheckpointError(f"{path}: weights do not match {settings}:\n  {lines}")
    return file_of


def _mismatch(name: str, found: TensorInfo, shard: Shard | None) -> list[str]:
    """Return what is wrong with tensor `name` of a file: one sentence or none."""
    if shard is None:
        return [f"unexpected {_shown(name)} {shown(found.shape)}"]
    as_blocks = shard.target.dtype == torch.uint8 and found.blocks_shape is not None
    if (found.blocks_shape if as_blocks else found.shape) != shard.shape:
        return [f"misshapen {name}: {shown(found.shape)}, the config says {shard.shape}"]
    if found.blocks_shape is not None:  # each of its types is converted
        return []
    dtypes: tuple[str, ...] = _DTYPES if shard.target.itemsize > 1 else _FP8_DTYPES
    dtypes = {torch.int64: _INT_DTYPES, torch.uint8: ("U8",)}.get(shard.target.dtype, dtypes)
    if found.dtype not in dtypes:
        return [f"{name} has dtype {found.dtype}, must have {' or '.join(dtypes)}"]
    return []


def _shown(name: str) -> str:
    return name if len(name) <= _MAX_NAME and name.isprintable() else shown(name)


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Return what the header of `file`, safetensors or GGUF, says of each tensor, by name.

    Raises:
        CheckpointError: the file is not sound, or names a tensor twice.
    """
    if is_gguf(file):
        return {
            name: TensorInfo(
                weight.tensor.shape,
                weight.tensor.type.name,
                weight.blocks_shape,
                weight.has_blocks,
            )
            for name, weight in read_gguf(file).weights.items()
        }
    try:
        with file.open("rb") as opened:
            num_bytes = int.from_bytes(opened.read(8), "little")
            if num_bytes > MAX_JSON_BYTES:
                raise OSError(f"its header has {num_bytes} bytes; at most {MAX_JSON_BYTES}")
            text = opened.read(num_bytes)
        with safe_open(file, framework="pt") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.offset_keys()}
            header = {
                name: TensorInfo(tuple(part.get_shape()), part.get_dtype())
                for name, part in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is not a sound safetensors file ({error!s:.200}); download it again"
        ) from error
    parse_object(text, f"the header of {file}")  # safetensors takes the last tensor of a name
    return header


class _Chunk(NamedTuple):
    """Some rows of a shard, few enough to read at once."""

    name: str
    slices: tuple[slice, ...]
    """Into the checkpoint's tensor."""
    target: torch.Tensor
    transposed: bool
    owner: nn.Module
    """Whose parameter the target is a part of."""

    def fitting(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values`, which were read, in the shape of `target`."""
        values = values[0] if values.ndim > self.target.ndim else values
        return values.T if self.transposed else values


def _chunks(shard: Shard, owner: nn.Module) -> Iterator[_Chunk]:
    unpadded = shard.target.narrow(shard.dim, 0, shard.unpadded_size)
    row_bytes = math.prod(shard.part_shape[1:]) * 4
    num_rows = max(1, _MAPPED_BYTES // 2 // row_bytes // _ROWS) * _ROWS
    for row in range(0, unpadded.shape[0], num_rows):
        target = unpadded[row : row + num_rows]
        slices = [slice(0, size) for size in target.shape]
        slices[0] = slice(row, row + len(target))
        along = slices[shard.dim]
        slices[shard.dim] = slice(along.start + shard.start, along.stop + shard.start)
        if shard.transposed:
            slices.reverse()
        if shard.index is not None:
            slices.insert(0, slice(shard.index, shard.index + 1))
        yield _Chunk(shard.name, tuple(slices), target, shard.transposed, owner)


def _read_chunks(file: Path, chunks: deque[_Chunk], keep: _Keep) -> Iterator[tuple[nn.Module, int]]:
    """Read `chunks` in the order of the file's bytes; yield each one's owner and bytes.

    Empties `chunks`, and keeps no reference to a target that is already filled.
    """
    if is_gguf(file):
        yield from _read_gguf_chunks(file, chunks, keep)
        return
    with safe_open(file, framework="pt") as tensors:
        order = {name: index for index, name in enumerate(tensors.offset_keys())}
    queue = deque(sorted(chunks, key=lambda chunk: order[chunk.name]))
    chunks.clear()
    while queue:
        mapped = 0
        with safe_open(file, framework="pt") as tensors:
            while queue and mapped < _MAPPED_BYTES:
                chunk = queue.popleft()
                values = tensors.get_slice(chunk.name)[chunk.slices]
                mapped += values.nbytes
                keep(chunk, values)
                read = chunk.owner, chunk.target.nbytes
                del chunk, values
                yield read


def _read_gguf_chunks(
    file: Path, chunks: deque[_Chunk], keep: _Keep
) -> Iterator[tuple[nn.Module, int]]:
    """Read `chunks` of a GGUF file, as `_read_chunks` does. A uint8 target receives the blocks."""
    weights = read_gguf(file).weights
    queue = deque(sorted(chunks, key=lambda chunk: weights[chunk.name].tensor.offset))
    chunks.clear()
    while queue:
        chunk = queue.popleft()
        rows, *columns = chunk.slices
        raw = chunk.target.dtype == torch.uint8
        values = read_rows(file, weights[chunk.name], rows, raw=raw)[(slice(None), *columns)]
        keep(chunk, torch.from_numpy(values))
        read = chunk.owner, chunk.target.nbytes
        del chunk, values
        yield read
