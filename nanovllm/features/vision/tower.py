"""The network that makes embeddings of a picture's patches: a vision transformer with options.

A tower computes one view at a time, alone, so that its bits depend on nothing else. It has no KV
and no part in tensor parallelism: each rank computes it whole.
"""

import dataclasses
import math
import re
from collections.abc import Collection, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.kernels.torch_kernels import TORCH, Kernels
from nanovllm.layers.layernorm import LayerNorm, Norm
from nanovllm.layers.linear import ColumnParallelLinear, LinearBase, OutputSlice
from nanovllm.loading.shards import Shard


@dataclasses.dataclass(frozen=True)
class TowerConfig:
    """The sizes of a tower, and what its layers have."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch_shape: tuple[int, ...]  # of the numbers of a patch, in their order in the checkpoint
    activation: str  # one of `torch_math.ACTIVATIONS`
    eps: float = 1e-6
    norm: type[Norm] = LayerNorm
    bias: bool = True  # of the layers' linears
    gated: bool = False  # whether the MLP is a gated linear unit

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def layer_weights(self) -> int:
        """The numbers of a layer's matrices."""
        mlp = (2 + self.gated) * self.intermediate_size
        return self.hidden_size * (4 * self.hidden_size + mlp)


class PatchLinear(LinearBase):
    """Embeds patches. Checkpoints have it as a convolution, whose weight has the `shape` of a patch
    besides the outputs.
    """

    def __init__(self, shape: tuple[int, ...], output_size: int, *, bias: bool = True) -> None:
        super().__init__(math.prod(shape), output_size, bias=bias)
        self.shape = shape

    def weight_shards(self, weight: Shard) -> Iterator[Shard]:
        shape = (weight.shape[0], *self.shape)
        yield dataclasses.replace(weight, shape=shape, target=weight.target.view(shape))


class TowerAttention(nn.Module):
    """Attention of all patches of a view to each other.

    Args:
        fused: whether the checkpoint has one matrix for queries, keys and values.
    """

    def __init__(self, config: TowerConfig, *, fused: bool) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        size = config.hidden_size
        slices = {f"{part}_proj": OutputSlice(size, 0, size) for part in "qkv"}
        self.qkv = ColumnParallelLinear(size, slices, bias=config.bias, fused=fused)
        self.proj = LinearBase(size, size, bias=config.bias)

    def forward(self, x: torch.Tensor, angles: torch.Tensor | None) -> torch.Tensor:
        """Return [P, hidden_size] for `x` [P, hidden_size]; `angles` as `View.angles` are."""
        qkv = self.qkv(x).view(len(x), 3, self.num_heads, -1)
        q, k, v = qkv.permute(1, 2, 0, 3)  # [num_heads, P, head_dim] each
        if angles is not None:
            q, k = rotated(q, angles), rotated(k, angles)
        heads = F.scaled_dot_product_attention(q, k, v)
        return self.proj(heads.transpose(0, 1).reshape(len(x), -1))


class TowerMLP(nn.Module):
    """Two linears with an activation between them."""

    kernels: Kernels = TORCH

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        size = config.intermediate_size
        self.fc1 = LinearBase(config.hidden_size, size, bias=config.bias)
        self.fc2 = LinearBase(size, config.hidden_size, bias=config.bias)
        self.activation = config.activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.kernels.act(self.fc1(x), self.activation))


class TowerLayer(nn.Module):
    """Attention and MLP, each after a norm, and added to what it reads."""

    def __init__(self, config: TowerConfig, *, fused: bool) -> None:
        super().__init__()
        self.norm1 = config.norm(config.hidden_size, config.eps)
        self.attn = TowerAttention(config, fused=fused)
        self.norm2 = config.norm(config.hidden_size, config.eps)
        self.mlp = TowerMLP(config)

    def forward(self, hidden: torch.Tensor, angles: torch.Tensor | None) -> torch.Tensor:
        """Return [P, hidden_size] for `hidden` [P, hidden_size], which changes."""
        x, _ = self.norm1.add_norm(None, hidden)
        x, hidden = self.norm2.add_norm(self.attn(x, angles), hidden)
        hidden += self.mlp(x)
        return hidden


class Merger(nn.Module):
    """Makes an embedding of neighbouring patches: norm, linear, activation, linear.

    Args:
        group: how many patches, which lie one after the other, become an embedding.
        norm_after: whether the norm is one of the whole group.
    """

    kernels: Kernels = TORCH

    def __init__(
        self,
        config: TowerConfig,
        group: int,
        output_size: int,
        *,
        norm_after: bool = False,
        activation: str = "gelu",
    ) -> None:
        super().__init__()
        self.size = config.hidden_size * group
        self.output_size = output_size
        self.norm = config.norm(self.size if norm_after else config.hidden_size, config.eps)
        self.linear_fc1 = LinearBase(self.size, self.size, bias=True)
        self.linear_fc2 = LinearBase(self.size, output_size, bias=True)
        self.activation = activation

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [P / group, output_size] for `hidden` [P, hidden_size]."""
        x = hidden.clone().view(-1, self.norm.weight.shape[0])
        x, _ = self.norm.add_norm(None, x)
        x = self.linear_fc1(x.view(-1, self.size))
        return self.linear_fc2(self.kernels.act(x, self.activation))


class LearnedGrid(nn.Module):
    """Learned vectors of places on a square, drawn out to the sides of a view: bilinear, and
    corners stay corners.

    Args:
        num_places: a square number.
        merge: patches lie in blocks of merge x merge.
    """

    def __init__(self, num_places: int, hidden_size: int, merge: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_places, hidden_size))
        self.side = round(num_places**0.5)
        self.merge = merge

    def forward(self, rows: int, columns: int) -> torch.Tensor:
        """Return [P, hidden_size] float32, for rows x columns patches."""
        y, x = block_places(rows, columns, self.merge, self.weight.device)
        last = self.side - 1
        y = y * (last / max(rows - 1, 1))
        x = x * (last / max(columns - 1, 1))
        found = torch.zeros((), device=y.device)
        for at_y, share_y in _taps(y, last):
            for at_x, share_x in _taps(x, last):
                vectors = self.weight[at_y * self.side + at_x].float()
                found = found + vectors * (share_y * share_x)[:, None]
        return found


def _taps(place: torch.Tensor, last: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the two learned places around each of `place`, and their shares."""
    low = place.floor().long().clamp(max=last)
    share = place - low
    return [(low, 1 - share), ((low + 1).clamp(max=last), share)]


def block_places(
    rows: int, columns: int, merge: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row and the column of each patch, [P] float32 each: blocks of merge x merge
    patches come one after the other.
    """
    y, x = torch.meshgrid(
        torch.arange(rows, device=device), torch.arange(columns, device=device), indexing="ij"
    )
    blocks = (rows // merge, merge, columns // merge, merge)
    return tuple(  # type: ignore[return-value]
        each.reshape(blocks).transpose(1, 2).reshape(-1).float() for each in (y, x)
    )


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Return `x` [heads, P, head_dim] with its pairs (i, i + head_dim / 2) rotated by `angles`
    [P, head_dim]: cosines, then sines.
    """
    cos, sin = angles.chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x.dtype)


@dataclasses.dataclass
class TowerState:
    """A view on its way through a tower."""

    hidden: torch.Tensor  # [P, hidden_size]
    angles: torch.Tensor | None  # [P, head_dim] float32: cosines, then sines
    num_layers: int = 0  # that it has passed
    deep: list[torch.Tensor] = dataclasses.field(default_factory=list)  # [N, output_size] each


class VisionTower(nn.Module):
    """Patches in, embeddings out.

    Args:
        positions: returns what is added to the patches of a grid.
        merger: makes embeddings of the last layer's states.
        deepstack: by layer, what makes embeddings of its states, which are added to the outputs of
            the text model's first layers.
        inv_freq: [head_dim / 4] float32, radians per row and per column; None: nothing rotates.

    Attributes:
        names: patterns of names of tensors, and what a checkpoint has in their places.
        places: prefixes that a checkpoint's names may have.
    """

    names: Mapping[str, str]
    places: tuple[str, ...]

    def __init__(
        self,
        config: TowerConfig,
        positions: LearnedGrid,
        merger: Merger,
        deepstack: Mapping[int, Merger],
        *,
        inv_freq: torch.Tensor | None,
        fused: bool = True,
    ) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchLinear(config.patch_shape, config.hidden_size)
        self.positions = positions
        self.layers = nn.ModuleList(
            [TowerLayer(config, fused=fused) for _ in range(config.num_layers)]
        )
        self.merger = merger
        self.deepstack = nn.ModuleList(deepstack.values())
        self.output_size = (1 + len(deepstack)) * merger.output_size  # of an embedding
        self._deepstack_at = tuple(deepstack)
        self._inv_freq = inv_freq

    def begin(self, patches: torch.Tensor, rows: int, columns: int) -> TowerState:
        """Return the state of a view before the first layer.

        Args:
            patches: [P, numbers], of rows x columns patches.
        """
        hidden = self.patch_embed(patches)
        hidden = hidden + self.positions(rows, columns).to(hidden.dtype)
        angles = None
        if self._inv_freq is not None:
            merge = self.positions.merge
            y, x = block_places(rows, columns, merge, hidden.device)
            turns = torch.cat([each[:, None] * self._inv_freq for each in (y, x)], dim=1)
            angles = torch.cat([turns.cos(), turns.sin()], dim=1)
        return TowerState(hidden, angles)

    def run(self, state: TowerState, num_layers: int) -> None:
        """Take a state through the next layers."""
        for layer in self.layers[state.num_layers : state.num_layers + num_layers]:
            state.hidden = layer(state.hidden, state.angles)
            if state.num_layers in self._deepstack_at:
                at = self._deepstack_at.index(state.num_layers)
                state.deep.append(self.deepstack[at](state.hidden))
            state.num_layers += 1

    def finish(self, state: TowerState) -> torch.Tensor:
        """Return the embeddings [N, (1 + D) * output_size] of a state after the last layer: for the
        text model's input, and to add to the outputs of its first D layers.
        """
        assert state.num_layers == len(self.layers)
        return torch.cat([self.merger(state.hidden), *state.deep], dim=1)

    def checkpoint_name(self, name: str, known: Collection[str]) -> str:
        """Return the checkpoint's name for tensor `name`. See `Renamed` in loading/shards.py."""
        for pattern, theirs in self.names.items():
            name = re.sub(pattern, theirs, name)
        names = self.all_names(self.places[0] + name)
        return next((each for each in names if each in known), names[0])

    def all_names(self, name: str) -> list[str]:
        """Return the names that checkpoints may have for the tensor that `checkpoint_name` calls
        `name` where none is known: that first.
        """
        return [place + name.removeprefix(self.places[0]) for place in self.places]
