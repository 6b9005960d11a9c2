"""Reads safetensors into a model's parameters, each rank its part, and accounts for every tensor
by name.

Knows no architecture: modules say through `shards()` which checkpoint tensors they are made of.
"""

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from tqdm.auto import tqdm

from nanovllm.errors import CheckpointError

_MAPPED_BYTES = 128 * 2**20
"""A file is mapped anew after this many bytes, so that the pages read do not stay resident."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """Where one checkpoint tensor goes on this rank.

    `target` (a view of a parameter) is filled from `[start, start + target.shape[dim])` of
    dimension `dim`; where the checkpoint's tensor ends before that (a padded vocabulary), the rest
    of `target` becomes zero.
    """

    name: str
    shape: tuple[int, ...]
    target: torch.Tensor
    dim: int = 0
    start: int = 0

    @property
    def filled(self) -> int:
        """How much of `target` along `dim` the checkpoint's tensor reaches."""
        left = self.shape[self.dim] - self.start
        return max(0, min(self.target.shape[self.dim], left))


@runtime_checkable
class Sharded(Protocol):
    """A module whose parameters are not plain copies of checkpoint tensors."""

    def shards(self, prefix: str) -> Iterator[Shard]:
        """Yield the shards of the module at dotted path `prefix`."""
        ...


def model_shards(model: nn.Module) -> dict[str, Shard]:
    """Return, by checkpoint name, every tensor that `model` is made of on this rank."""
    return {shard.name: shard for _, shards in _shards_of(model) for shard in shards}


def _shards_of(model: nn.Module) -> Iterator[tuple[nn.Module, list[Shard]]]:
    """Yield each module that has parameters of its own, and what they are made of."""
    for prefix, module in model.named_modules():
        if isinstance(module, Sharded):
            assert isinstance(module, nn.Module)
            yield module, list(module.shards(prefix))
        elif own := list(module.named_parameters(recurse=False)):
            yield module, [Shard(f"{prefix}.{name}", tuple(p.shape), p.data) for name, p in own]


def load_weights(
    model: nn.Module,
    files: list[Path],
    *,
    ignored: frozenset[str] = frozenset(),
    progress: bool = True,
    loaded: Callable[[nn.Module], None] = lambda module: None,
) -> None:
    """Fill `model` from safetensors `files`.

    Args:
        ignored: checkpoint names that may be present and are neither needed nor read.
        loaded: called with each module as soon as its parameters are complete; it may replace them.

    Raises:
        CheckpointError: a file is corrupt, or tensors are missing, unexpected or misshapen; all
            are listed.
    """
    pieces, owners = _plan(model, files, ignored)
    # Only the pieces hold the targets, and only until they are read.
    waiting = {module: 0 for module, _ in _shards_of(model)}  # for so many pieces
    for queue in pieces.values():
        for name in [piece.name for piece in queue]:
            waiting[owners[name]] += 1
    total = sum(piece.target.nbytes for queue in pieces.values() for piece in queue)
    with tqdm(
        total=total,
        unit="B",
        unit_scale=True,
        desc="Loading weights",
        disable=not progress,
        delay=1,
    ) as bar:
        for file in files:
            for name, size in _fill(file, pieces.pop(file)):
                bar.update(size)
                waiting[owners[name]] -= 1
                if not waiting[owners[name]]:
                    del waiting[owners[name]]
                    loaded(owners[name])
    for module in waiting:
        loaded(module)


def _plan(
    model: nn.Module, files: list[Path], ignored: frozenset[str]
) -> tuple[dict[Path, deque["_Piece"]], dict[str, nn.Module]]:
    """Return what to read from each file, and the module that each tensor belongs to."""
    shards: dict[str, Shard] = {}
    owners: dict[str, nn.Module] = {}
    for module, own in _shards_of(model):
        names = {shard.name: shard for shard in own if shard.name not in ignored}
        shards.update(names)
        owners.update(dict.fromkeys(names, module))
    found: dict[str, Path] = {}
    wrong: list[str] = []
    for file in files:
        for name, shape in _shapes(file).items():
            if name in ignored:
                continue
            if name in found:
                wrong.append(f"{name} is in both {found[name].name} and {file.name}")
            elif name not in shards:
                wrong.append(f"unexpected {name} {shape}")
            elif shape != shards[name].shape:
                wrong.append(f"misshapen {name}: {shape}, the config says {shards[name].shape}")
            found[name] = file
    wrong += [
        f"missing {name} {shard.shape}" for name, shard in shards.items() if name not in found
    ]
    if wrong:
        shown = "\n  ".join(wrong[:20]) + (
            f"\n  and {len(wrong) - 20} more" if len(wrong) > 20 else ""
        )
        raise CheckpointError(f"{files[0].parent}: weights do not match config.json:\n  {shown}")

    pieces: dict[Path, deque[_Piece]] = {file: deque() for file in files}
    for name, shard in shards.items():
        rest = shard.target.shape[shard.dim] - shard.filled
        shard.target.narrow(shard.dim, shard.filled, rest).zero_()
        pieces[found[name]].extend(_pieces(shard))
    return pieces, owners


def init_dummy_weights(model: nn.Module, seed: int = 0) -> None:
    """Fill `model` with small random weights (vectors, which are norms and biases, with ones and
    zeros).
    """
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.data.fill_(0.0 if name.endswith("bias") else 1.0)
        elif parameter.itemsize > 1:
            parameter.data.uniform_(-0.035, 0.035, generator=generator)
        else:  # FP8, of which torch draws no numbers
            wide = torch.empty_like(parameter, dtype=torch.float32)
            parameter.data.copy_(wide.uniform_(-0.035, 0.035, generator=generator))


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(file, framework="pt") as tensors:
            names = tensors.offset_keys()
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in names}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is not a sound safetensors file ({error}); download it again"
        ) from error


class _Piece(NamedTuple):
    """Rows of a bounded size."""

    name: str
    rows: tuple[slice, ...]
    """Of the checkpoint's tensor."""
    target: torch.Tensor


def _pieces(shard: Shard) -> Iterator[_Piece]:
    filled = shard.target.narrow(shard.dim, 0, shard.filled)
    row_bytes = math.prod(shard.shape[1:]) * 4
    step = max(1, _MAPPED_BYTES // 2 // row_bytes)
    for row in range(0, filled.shape[0], step):
        part = filled[row : row + step]
        index = [slice(0, size) for size in part.shape]
        index[0] = slice(row, row + len(part))
        index[shard.dim] = slice(
            index[shard.dim].start + shard.start, index[shard.dim].stop + shard.start
        )
        yield _Piece(shard.name, tuple(index), part)


def _fill(file: Path, pieces: deque[_Piece]) -> Iterator[tuple[str, int]]:
    """Fill the targets of `pieces` in the order of the file's bytes; yield names and bytes."""
    with safe_open(file, framework="pt") as tensors:
        order = {name: index for index, name in enumerate(tensors.offset_keys())}
    queue = deque(sorted(pieces, key=lambda piece: order[piece.name]))
    pieces.clear()
    while queue:
        mapped = 0
        with safe_open(file, framework="pt") as tensors:
            while queue and mapped < _MAPPED_BYTES:
                name, rows, target = queue.popleft()
                piece = tensors.get_slice(name)[rows]
                mapped += piece.nbytes
                target.copy_(piece)
                size = target.nbytes
                del target, piece
                yield name, size
