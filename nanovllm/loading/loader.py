"""Loads safetensors or GGUF files into a model's parameters, or random weights in their place.

Each rank reads its own part only. Every tensor must match by name, shape and dtype; each module
lists its checkpoint tensors in `shards()`.
"""

import logging
import math
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from nanovllm.errors import CheckpointError
from nanovllm.loading.files import is_gguf
from nanovllm.loading.shards import Shard, model_shards
from nanovllm.loading.tensor_files import TensorFile, TensorInfo, read_header
from nanovllm.options.validation import listed, shown
from nanovllm.utils.progress import progress_bar

logger = logging.getLogger(__name__)

_DUMMY_LIMIT = 0.035
"""Of a random weight, either side of 0."""
_DUMMY_SCALE = 2.0**-7
"""Of stored weights whose scale is a tensor."""
_DUMMY_ROWS = 1024
"""Rows that are filled at once."""
_NUMBERS = 2**20
"""Of a chunk, at most, but for chunks of fewest rows."""
_ROWS = 32
"""A chunk's rows are a multiple of it, except for a tensor's last: packed weights are cut there."""
_MAX_LISTED = 20
"""Mismatches that one error lists."""
_NUMBER = re.compile(r"\d+")
_MAX_NAME = 200
"""Characters of a tensor's name that an error shows as they are."""
_FLOATS = ("BF16", "F16", "F32", "F64")
_DTYPES: dict[torch.dtype, tuple[str, ...]] = {
    torch.bfloat16: _FLOATS,
    torch.float16: _FLOATS,
    torch.float32: _FLOATS,
    torch.float8_e4m3fn: ("F8_E4M3",),
    torch.int64: ("I64", "I32"),
    torch.int32: ("I32",),
    torch.int8: ("I8",),
    torch.uint8: ("U8", "F8_E8M0"),
}
"""What is converted to a target's dtype, in safetensors' names. uint8 takes the bits."""
_MAX_UNIT_DIMENSIONS = 2
"""Of a tensor of one number, which any target of one number takes."""

Store = Callable[[nn.Module, torch.Tensor, torch.Tensor], bool]
"""Gets a module, a part of its memory or of a meta tensor, and the values that belong there.
Returns whether it has stored them; if not, they are copied there."""
_Keep = Callable[["_Chunk", torch.Tensor], None]


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
        _log_left_out(
            (n for header in headers.values() for n in header if n not in file_of), ignored
        )
    chunks = _plan(model, file_of, headers, ignored)

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
            for module, size in _read_chunks(file, headers[file], chunks.pop(file, deque()), keep):
                bar.update(size)
                num_unread[module] -= 1
                if not num_unread[module]:
                    del num_unread[module]
                    on_loaded(module)
    for module in num_unread:  # nothing to read: ignored tensors, or padding only
        on_loaded(module)


def _log_left_out(names: Iterable[str], ignored: frozenset[str]) -> None:
    """Log `names`, tensors that are not loaded: one entry for those that differ in numbers only, or
    are of one part that `ignored` names.
    """
    parts = tuple(part for part in ignored if part.endswith("."))
    found = Counter(
        next((f"{part}*" for part in parts if name.startswith(part)), _NUMBER.sub("*", name))
        for name in names
    )
    if found:
        entries = (
            f"{_shown(entry)} ({count} tensors)" if "*" in entry else _shown(entry)
            for entry, count in sorted(found.items())
        )
        logger.info("left out, because this network needs none of it: %s", ", ".join(entries))


def _plan(
    model: nn.Module,
    file_of: dict[str, Path],
    headers: dict[Path, dict[str, TensorInfo]],
    ignored: frozenset[str],
) -> dict[Path, deque["_Chunk"]]:
    chunks: dict[Path, deque[_Chunk]] = {}
    for module, shards in model_shards(model, file_of):
        for shard in shards:
            if shard.name in ignored or (shard.optional and shard.name not in file_of):
                continue
            padding = shard.target.shape[shard.dim] - shard.unpadded_size
            shard.target.narrow(shard.dim, shard.unpadded_size, padding).zero_()
            file = file_of[shard.name]
            shard = shard.as_stored(headers[file][shard.name].shape)
            chunks.setdefault(file, deque()).extend(_chunks(shard, module))
    return chunks


def check_tensors(
    model: nn.Module, headers: dict[Path, dict[str, TensorInfo]], ignored: frozenset[str]
) -> dict[str, Path]:
    """Return the file that holds each tensor of `model`, which may be on torch's meta device.

    Args:
        headers: what `read_header` returns, by file.
        ignored: names that may be present or absent; one that ends in "." stands for all names
            that begin with it, one that begins with "." for those that end in it, unless `model`
            has the tensor.

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
    ends = tuple(name for name in ignored if name.startswith("."))
    file_of: dict[str, Path] = {}
    wrong: list[str] = []
    for file, header in headers.items():
        for name, found in header.items():
            if name in ignored or name.startswith(left_out):
                continue
            if name not in shards and name.endswith(ends):
                continue
            if name in file_of:
                wrong.append(f"{_shown(name)} is in both {file_of[name].name} and {file.name}")
            else:
                wrong += _mismatch(name, found, shards.get(name))
            file_of[name] = file
    wrong += [
        f"missing {name} {shard.shape}"
        for name, shard in shards.items()
        if name not in file_of and not shard.optional
    ]
    if wrong:
        lines = listed(wrong, _MAX_LISTED, "\n  ")
        file = next(iter(headers))
        path, settings = (file, "its metadata") if is_gguf(file) else (file.parent, "config.json")
        raise CheckpointError(f"{path}: weights do not match {settings}:\n  {lines}")
    return file_of


def _mismatch(name: str, found: TensorInfo, shard: Shard | None) -> list[str]:
    """Return what is wrong with tensor `name` of a file: one sentence or none."""
    if shard is None:
        return [f"unexpected {_shown(name)} {shown(found.shape)}"]
    as_blocks = shard.target.dtype == torch.uint8 and found.blocks_shape is not None
    shape = found.blocks_shape if as_blocks else found.shape
    shard = shard.as_stored(found.shape)
    is_same_number = _is_one_number(found.shape) and _is_one_number(shard.shape)
    if shape != shard.shape and not is_same_number:
        return [f"misshapen {name}: {shown(found.shape)}, the config says {shard.shape}"]
    if found.blocks_shape is not None:  # each of its types is converted
        return []
    dtypes = _DTYPES[shard.target.dtype]
    if found.dtype not in dtypes:
        return [f"{name} has dtype {found.dtype}, must have {' or '.join(dtypes)}"]
    return []


def _is_one_number(shape: tuple[int, ...]) -> bool:
    return math.prod(shape) == 1 and len(shape) <= _MAX_UNIT_DIMENSIONS


def _shown(name: str) -> str:
    return name if len(name) <= _MAX_NAME and name.isprintable() else shown(name)


class _Chunk(NamedTuple):
    """Some rows of a shard, few enough to read at once."""

    name: str
    slices: tuple[slice, ...]  # into the checkpoint's tensor
    target: torch.Tensor
    transposed: bool
    owner: nn.Module  # whose parameter the target is a part of

    def fitting(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values`, which were read, in the shape of `target`."""
        if values.numel() == 1:
            return values.view(self.target.shape)
        values = values[0] if values.ndim > self.target.ndim else values
        return values.T if self.transposed else values


def _chunks(shard: Shard, owner: nn.Module) -> Iterator[_Chunk]:
    unpadded = shard.target.narrow(shard.dim, 0, shard.unpadded_size)
    row_numbers = max(1, math.prod(shard.part_shape[1:]))
    num_rows = max(1, _NUMBERS // row_numbers // _ROWS) * _ROWS
    if shard.transposed:  # each of whose rows lies in all rows of the file
        num_rows = max(1, len(unpadded))
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


def _in_order(chunks: Iterable[_Chunk], header: dict[str, TensorInfo]) -> deque[_Chunk]:
    """Return `chunks` by modules, in the order of the file's bytes.

    A file may have all scales after all weights. So all tensors of a module are read when its
    largest is: it gets its final form before the next one takes memory.
    """
    largest: dict[nn.Module, tuple[int, int]] = {}
    for chunk in chunks:
        info = header[chunk.name]
        size = math.prod(info.shape)
        if size > largest.get(chunk.owner, (-1, 0))[0]:
            largest[chunk.owner] = size, info.offset
    return deque(
        sorted(chunks, key=lambda each: (largest[each.owner][1], header[each.name].offset))
    )


def _read_chunks(
    file: Path, header: dict[str, TensorInfo], chunks: deque[_Chunk], keep: _Keep
) -> Iterator[tuple[nn.Module, int]]:
    """Read `chunks` of a file; yield each one's owner and bytes. A GGUF file's blocks go to a uint8
    target as they are.

    Empties `chunks`, and keeps no reference to a target that is already filled.
    """
    queue = _in_order(chunks, header)
    chunks.clear()
    with closing(TensorFile(file, header, maps=True)) as tensors:
        while queue:
            chunk = queue.popleft()
            raw = chunk.target.dtype == torch.uint8
            keep(chunk, tensors.read(chunk.name, chunk.slices, raw=raw))
            read = chunk.owner, chunk.target.nbytes
            del chunk
            yield read


def init_dummy_weights(model: nn.Module, seed: int = 0) -> None:
    """Fill `model` with small random weights, norm weights with ones and biases with zeros.

    Parameters on torch's meta device stay as they are.
    """
    parameters = [(name, p) for name, p in model.named_parameters() if not p.is_meta]
    generator = torch.Generator(parameters[0][1].device).manual_seed(seed)
    for name, parameter in parameters:
        if parameter.ndim == 1:
            parameter.data.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            parameter.data.uniform_(-_DUMMY_LIMIT, _DUMMY_LIMIT, generator=generator)


def init_dummy_shards(
    module: nn.Module, shards: Iterable[Shard], store: Store, seed: int = 0
) -> None:
    """Fill the targets of the shards of `module`, whose weight is stored in another form.

    Plain weights and those in FP8 are small and random. Integers are 0, and other numbers are
    small: scales, most likely.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    for shard in shards:
        target = shard.target
        if target.is_meta or (target.itemsize == 1 and target.is_floating_point()):
            for start in range(0, len(target), _DUMMY_ROWS):
                rows = target[start : start + _DUMMY_ROWS]
                values = torch.empty(rows.shape, dtype=torch.float32)
                values.uniform_(-_DUMMY_LIMIT, _DUMMY_LIMIT, generator=generator)
                if not store(module, rows, values):
                    rows.copy_(values)
        elif target.is_floating_point():
            target.fill_(0.0 if shard.name.endswith(".bias") else _DUMMY_SCALE)
        else:
            target.zero_()
