"""`Shard`: which part of which checkpoint tensor goes where. Each module lists its own."""

import dataclasses
from collections.abc import Collection, Iterator
from typing import Protocol, runtime_checkable

import torch
from torch import nn


@dataclasses.dataclass(frozen=True)
class Shard:
    """This rank's part of one checkpoint tensor.

    `target` (a view of a parameter) receives `[start, start + target.shape[dim])` of dimension
    `dim`. If the checkpoint's tensor ends before that (a padded vocabulary), the rest of `target`
    becomes zero.
    """

    name: str
    shape: tuple[int, ...]  # of the whole checkpoint tensor
    target: torch.Tensor
    dim: int = 0
    start: int = 0
    # Only this index of the tensor's first dimension is read; `dim` does not count it.
    index: int | None = None
    # The tensor's matrix is [inputs, outputs]: `target` is a part of the transpose.
    transposed: bool = False
    optional: bool = False  # whether a checkpoint may lack the tensor: `target` stays as it is then
    either: bool = False  # whether a checkpoint may also have its matrix the other way round

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Return the shape of what `target` is a part of."""
        shape = self.shape if self.index is None else self.shape[1:]
        return shape[::-1] if self.transposed else shape

    def as_stored(self, shape: tuple[int, ...]) -> "Shard":
        """Return this shard for a checkpoint whose tensor has this shape."""
        turned = (*self.shape[:-2], *self.shape[:-3:-1])
        if not self.either or shape == self.shape or shape != turned:
            return self
        return dataclasses.replace(self, shape=turned, transposed=not self.transposed)

    @property
    def unpadded_size(self) -> int:
        """Return the length of `target` along `dim` without the padding."""
        left = self.part_shape[self.dim] - self.start
        return max(0, min(self.target.shape[self.dim], left))


@runtime_checkable
class Renamed(Protocol):
    """A model whose modules have other names in some of its checkpoints."""

    def checkpoint_name(self, name: str, known: Collection[str]) -> str:
        """Return the checkpoint's name of the tensor that the modules call `name`.

        Args:
            known: the names of all tensors of the checkpoint; empty: it is not read yet.
        """
        ...


@runtime_checkable
class Expecting(Protocol):
    """A model some of whose tensors a checkpoint may have in one form or another."""

    def expect(self, known: Collection[str]) -> None:
        """Load the form of a checkpoint whose tensors have the names `known`."""
        ...


@runtime_checkable
class Sharded(Protocol):
    """A module whose parameters are not plain copies of checkpoint tensors."""

    def shards(self, prefix: str) -> Iterator[Shard]:
        """Yield the shards of the module at dotted path `prefix`."""
        ...


def model_shards(
    model: nn.Module, known: Collection[str] = ()
) -> Iterator[tuple[nn.Module, list[Shard]]]:
    """Yield each module that has its own parameters, with the shards that fill them."""
    if known and isinstance(model, Expecting):
        model.expect(known)
    for prefix, module in model.named_modules():
        if isinstance(module, Sharded):
            assert isinstance(module, nn.Module)
            shards = list(module.shards(prefix))
        elif own := list(module.named_parameters(recurse=False)):
            shards = [Shard(f"{prefix}.{name}", tuple(p.shape), p.data) for name, p in own]
        else:
            continue
        if isinstance(model, Renamed):
            shards = [
                dataclasses.replace(shard, name=model.checkpoint_name(shard.name, known))
                for shard in shards
            ]
        yield module, shards
