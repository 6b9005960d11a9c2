"""Weights whose rows are pieces of checkpoint tensors: of some heads, or of some channels."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from nanovllm.kernels.torch_kernels import TORCH, HeadWeight, Kernels
from nanovllm.layers.linear import LinearBase, WeightModule
from nanovllm.loading.shards import Shard
from nanovllm.utils.distributed import tensor_parallel


class TensorRows(NamedTuple):
    """Some consecutive rows of a checkpoint tensor."""

    name: str  # of the checkpoint's module, which replaces this one's name in the path
    total: int  # rows of the tensor
    start: int
    size: int


def own_rows(name: str, total: int, before: int = 0, size: int | None = None) -> TensorRows:
    """Return this rank's share of the `size` rows from `before` on; None: of all `total` rows."""
    ranks = tensor_parallel()
    own = (total if size is None else size) // ranks.size
    return TensorRows(name, total, before + ranks.rank * own, own)


def head_rows(name: str, heads: int, stride: int, offset: int, size: int) -> list[TensorRows]:
    """Return `size` rows of each of this rank's heads, from row `offset` of the head's `stride`
    rows on. `heads` are those of all ranks.
    """
    ranks = tensor_parallel()
    own = heads // ranks.size
    starts = (head * stride + offset for head in range(ranks.rank * own, (ranks.rank + 1) * own))
    return [TensorRows(name, heads * stride, start, size) for start in starts]


def joined(pieces: Iterable[TensorRows]) -> list[TensorRows]:
    """Return `pieces` with those as one that follow each other in their tensor, too."""
    found: list[TensorRows] = []
    for piece in pieces:
        last = found[-1] if found else None
        if last and last.name == piece.name and last.start + last.size == piece.start:
            found[-1] = last._replace(size=last.size + piece.size)
        else:
            found.append(piece)
    return found


class PiecedLinear(LinearBase):
    """A linear whose outputs are pieces of checkpoint linears, side by side.

    Args:
        pieces: of this rank.
    """

    def __init__(
        self, input_size: int, pieces: Iterable[TensorRows], *, bias: bool = False
    ) -> None:
        self.pieces = joined(pieces)
        super().__init__(input_size, sum(piece.size for piece in self.pieces), bias=bias)

    def shards(self, prefix: str) -> Iterator[Shard]:
        for part in _shards(self, self.pieces, prefix):
            yield from self.weight_shards(part) if part.target.ndim == 2 else [part]


class SmallLinear(PiecedLinear):
    """A linear that keeps its bits when others are rounded: small, and its outputs are gates."""


class HeadLinear(WeightModule):
    """A linear for each head. It keeps its bits when others are rounded: it is small.

    An adapter of a request cannot change it, because it is no `LinearBase`; a merged one can.

    Args:
        pieces: the rows of each head of this rank, equally many.
        turned: whether the rows of a head belong to its inputs, and its outputs are `columns`.
    """

    kernels: Kernels = TORCH  # the loader sets those of the device
    is_gathered = True

    def __init__(self, columns: int, pieces: Sequence[TensorRows], *, turned: bool = False) -> None:
        self.pieces = pieces
        self.turned = turned
        self.is_split = False
        """Whether the checkpoint has a tensor for each head: [outputs, inputs]."""
        super().__init__(sum(piece.size for piece in pieces), columns)

    def forward(self, x: torch.Tensor, out: torch.Tensor, kept: int = 0) -> None:
        """Write the product of each head of `x` with its weight to `out`.

        Args:
            x: [T, heads, kept + inputs]; tokens and heads may lie apart.
            out: [T, heads, kept + outputs], likewise. The first `kept` numbers are copied.
        """
        rows = self.method if self.weight is None else self.weight
        assert rows is not None
        weight = HeadWeight(rows, len(self.pieces), self.pieces[0].size, self.turned)
        self.kernels.head_linear(x, weight, out, kept)

    def shards(self, prefix: str) -> Iterator[Shard]:
        merged = _shards(self, joined(self.pieces), prefix)
        for part in self._split_shards(prefix) if self.is_split else merged:
            yield from self.weight_shards(part)

    def _split_shards(self, prefix: str) -> Iterator[Shard]:
        """Yield each head's tensor; of those of other ranks, no rows."""
        assert self.weight is not None
        ranks = tensor_parallel()
        own = len(self.pieces)
        heads = self.weight.data.view(own, self.pieces[0].size, -1)
        shape = tuple(heads[0].T.shape if self.turned else heads[0].shape)
        for head in range(own * ranks.size):
            rank, index = divmod(head, own)
            rows = heads[index, : None if rank == ranks.rank else 0]
            yield Shard(f"{prefix}.{head}.weight", shape, rows, transposed=self.turned)


class ChannelConv(nn.Module):
    """The weight of a depthwise convolution whose channels are pieces of a checkpoint's.

    Args:
        pieces: of this rank.
        taps: tokens that a channel's sum takes.
    """

    def __init__(self, pieces: Sequence[TensorRows], taps: int, *, bias: bool = False) -> None:
        super().__init__()
        self.pieces = joined(pieces)
        self.channels = sum(piece.size for piece in self.pieces)
        self.weight = nn.Parameter(torch.empty(self.channels, 1, taps))
        self.bias = nn.Parameter(torch.empty(self.channels)) if bias else None

    @property
    def taps(self) -> torch.Tensor:
        """Return the weight as [channels, taps], the oldest token's tap first."""
        return self.weight.view(self.channels, -1)

    def shards(self, prefix: str) -> Iterator[Shard]:
        yield from _shards(self, self.pieces, prefix)


def _shards(module: nn.Module, pieces: list[TensorRows], prefix: str) -> Iterator[Shard]:
    """Yield each piece's rows of the weight, and of the bias if there is one."""
    parent = prefix.rpartition(".")[0]
    row = 0
    for piece in pieces:
        rows = slice(row, row + piece.size)
        row += piece.size
        for name, parameter in module.named_parameters(recurse=False):
            target = parameter.data[rows]
            shape = piece.total, *target.shape[1:]
            yield Shard(f"{parent}.{piece.name}.{name}", shape, target, start=piece.start)


def head_shards(module: nn.Module, prefix: str, *names: str) -> Iterator[Shard]:
    """Yield this rank's numbers of the parameters `names`, whose numbers are split over the ranks
    in order: one for each head, or for each channel.
    """
    ranks = tensor_parallel()
    for name in names:
        own = module.get_parameter(name).data
        size = len(own)
        yield Shard(f"{prefix}.{name}", (size * ranks.size,), own, start=size * ranks.rank)
