"""Reads safetensors into a model's parameters, each rank its part, and accounts for every tensor
by name.

Knows no architecture: modules say through `shards()` which checkpoint tensors they are made of.
"""

import dataclasses
import math
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

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
    shards: dict[str, Shard] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, Sharded):
            found = list(module.shards(prefix))
        else:
            found = [
                Shard(f"{prefix}.{name}", tuple(p.shape), p.data)
                for name, p in module.named_parameters(recurse=False)
            ]
        shards.update((shard.name, shard) for shard in found)
    return shards


def load_weights(
    model: nn.Module,
    files: list[Path],
    *,
    ignored: frozenset[str] = frozenset(),
    progress: bool = True,
) -> None:
    """Fill `model` from safetensors `files`.

    Args:
        ignored: checkpoint names that may be present and are neither needed nor read.

    Raises:
        CheckpointError: a file is corrupt, or tensors are missing, unexpected or misshapen; all
            are listed.
    """
    shards = {name: s for name, s in model_shards(model).items() if name not in ignored}
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

    for shard in shards.values():
        rest = shard.target.shape[shard.dim] - shard.filled
        shard.target.narrow(shard.dim, shard.filled, rest).zero_()
    total = sum(shard.target.nbytes for shard in shards.values())
    with tqdm(
        total=total,
        unit="B",
        unit_scale=True,
        desc="Loading weights",
        disable=not progress,
        delay=1,
    ) as bar:
        for file in files:
            names = [name for name, where in found.items() if where == file]
            for target, piece in _read(file, [shards[name] for name in names]):
                target.copy_(piece)
                bar.update(target.nbytes)


def init_dummy_weights(model: nn.Module, seed: int = 0) -> None:
    """Fill `model` with small random weights (vectors, which are norms and biases, with ones and
    zeros).
    """
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.data.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            parameter.data.uniform_(-0.035, 0.035, generator=generator)


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(file, framework="pt") as tensors:
            names = tensors.offset_keys()
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in names}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is not a sound safetensors file ({error}); download it again"
        ) from error


def _read(file: Path, shards: list[Shard]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (part of a target, what to fill it with), in the order of the file's bytes. The latter
    is a view of a mapping.
    """
    with safe_open(file, framework="pt") as tensors:
        order = {name: index for index, name in enumerate(tensors.offset_keys())}
    shards = sorted(shards, key=lambda shard: order[shard.name])
    pieces = deque((shard, *piece) for shard in shards for piece in _pieces(shard))
    while pieces:
        mapped = 0
        with safe_open(file, framework="pt") as tensors:
            while pieces and mapped < _MAPPED_BYTES:
                shard, index, target = pieces.popleft()
                tensor = tensors.get_slice(shard.name)[index]
                mapped += len(tensor) * math.prod(shard.shape[1:]) * tensor.element_size()
                yield target, tensor
                del tensor


def _pieces(shard: Shard) -> Iterator[tuple[tuple[slice, ...], torch.Tensor]]:
    """Yield (index of the checkpoint's tensor, part of the target) for row ranges of a bounded
    size.
    """
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
        yield tuple(index), part
