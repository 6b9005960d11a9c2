"""Which checkpoint linears a model's layers compute, and where their outputs are in the layers."""

from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from nanovllm.layers.linear import LinearBase
from nanovllm.loading.shards import Renamed, Shard
from nanovllm.models.decoder import Family

WEIGHT = ".weight"


class LinearOutputs(NamedTuple):
    """Consecutive outputs of a layer: some outputs of a checkpoint linear."""

    row: int
    """The first in the layer."""
    start: int
    """The first in the checkpoint linear."""
    size: int


class Slice(NamedTuple):
    """The outputs of a layer that one checkpoint linear computes, side by side."""

    name: str
    """The linear's path in the checkpoint, as `Family.all_names` has it first."""
    shape: tuple[int, int]
    """The linear's outputs and inputs, of all ranks together."""
    pieces: list[LinearOutputs]

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)


class LoRATarget(NamedTuple):
    """A layer that adapters may change: one or more checkpoint linears."""

    inputs: int
    """Of this rank."""
    input_start: int
    """The first of them in the checkpoint linears."""
    slices: list[Slice]


def layer_targets(model: nn.Module) -> dict[str, LoRATarget]:
    """Return this rank's layers that adapters may change, by their module's path.

    Args:
        model: with plain weights, which may be on torch's meta device.
    """
    found = {}
    for prefix, module in model.named_modules():
        if isinstance(module, LinearBase):
            shards = [shard for shard in module.shards(prefix) if shard.name.endswith(WEIGHT)]
            names = [shard.name for shard in shards]
            if isinstance(model, Renamed):
                names = [model.checkpoint_name(name, ()) for name in names]
            found[prefix] = _target(shards, [name.removesuffix(WEIGHT) for name in names])
    return found


def named_slices(model: nn.Module, targets: Iterable[LoRATarget]) -> dict[str, Slice]:
    """Return the slices of `targets` by every name that an adapter may have for their linears:
    those of transformers' classes, with pictures and without a head, and of published classes.
    """
    own = {part.name: part for target in targets for part in target.slices}
    found = dict(own)
    if isinstance(model, Family):
        for name, part in own.items():
            for other in model.all_names(f"{name}{WEIGHT}"):
                found.setdefault(other.removesuffix(WEIGHT), part)
    return found


def _target(shards: list[Shard], names: list[str]) -> LoRATarget:
    slices: list[Slice] = []
    inputs = shards[0].target.shape[1]
    input_start = 0
    for shard, name in zip(shards, names, strict=True):
        start = shard.start
        if shard.dim == 1:
            input_start = shard.start
            start = 0
        piece = LinearOutputs(shard.target.storage_offset() // inputs, start, len(shard.target))
        if slices and slices[-1].name == name:
            slices[-1].pieces.append(piece)
        else:
            slices.append(Slice(name, (shard.part_shape[0], shard.part_shape[1]), [piece]))
    return LoRATarget(inputs, input_start, slices)
