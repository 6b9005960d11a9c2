"""The network that makes embeddings of a picture's patches: a vision transformer with options.

A tower computes one view at a time, alone, so that its bits depend on nothing else. It has no KV
and no part in tensor parallelism: each rank computes it whole.
"""

import dataclasses
import itertools
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence as Seq
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.attention.backend import Backend
from nanovllm.attention.batch import Batch, HostLengths
from nanovllm.attention.spec import AttentionSpec, QKNormRope
from nanovllm.errors import CheckpointError
from nanovllm.kernels.torch_kernels import TORCH, Kernels
from nanovllm.kernels.torch_math import NORM_WIDE
from nanovllm.layers.layernorm import LayerNorm, Norm, RMSNorm
from nanovllm.layers.linear import ColumnParallelLinear, LinearBase, OutputSlice
from nanovllm.layers.pieces import PiecedLinear, TensorRows
from nanovllm.layers.rotary_embedding import inverse_frequencies
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
    norm: Callable[[int, float], Norm] = LayerNorm
    bias: bool = True  # of the layers' linears
    gated: bool = False  # whether the MLP is a gated linear unit
    merge: int = 1  # patches lie in blocks of merge x merge
    patch_bias: bool = True  # of the linear that embeds patches
    norm_first: bool = False  # whether embedded patches are normalised
    norm_last: bool = False  # whether the last layer's states are
    num_kv_heads: int | None = None  # None: as many as `num_heads`
    qk_norm: bool = False  # whether queries and keys are normalised, head by head
    v_norm: bool = False  # whether values are, without a weight
    scale: float | None = None  # of scores; None: head_dim ** -0.5
    sandwich: bool = False  # whether attention and MLP are each normalised before they are added
    # Whether the linears of layers are those of a `BoundedLinear`, and have bounds; None: neither.
    # Heads of a checkpoint then rotate by columns in their first half, by rows in their second.
    bounded: bool | None = None
    convolved: Collection[int] = ()  # layers with a `GridConvolution` in place of attention
    kernel_size: int = 3  # of those, in patches
    windowed: Collection[int] = ()  # layers in which patches attend to those of their window
    window: int = 1  # its side, in blocks

    def __post_init__(self) -> None:
        kv_heads = self.num_kv_heads or self.num_heads
        if self.hidden_size % self.num_heads or self.num_heads % kv_heads:
            raise CheckpointError(
                f"config.json: vision_config's hidden_size {self.hidden_size} must be a multiple "
                f"of its heads, {self.num_heads}, and those one of its heads of keys, {kv_heads}"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def kv_size(self) -> int:
        """The numbers of all keys of a patch, or of all values."""
        return self.head_dim * (self.num_kv_heads or self.num_heads)

    @property
    def layer_weights(self) -> int:
        """The numbers of a layer's matrices."""
        mlp = (2 + self.gated) * self.intermediate_size
        return self.hidden_size * (2 * self.hidden_size + 2 * self.kv_size + mlp)

    def bound(self, linear: LinearBase) -> nn.Module:
        """Return `linear`, in a `BoundedLinear` if the layers have those."""
        return linear if self.bounded is None else BoundedLinear(linear, bounded=self.bounded)


@dataclasses.dataclass(frozen=True)
class Grid:
    """The places of a view's patches, which lie block by block."""

    rows: int  # of patches
    columns: int
    angles: torch.Tensor  # [P, head_dim] float32: cosines, then sines; [P, 0]: nothing rotates
    order: torch.Tensor | None  # [blocks] int64: those of a window come together
    backend: Backend
    kv_cache: torch.Tensor  # of a layer; each one overwrites the last one's
    whole: Batch  # all patches as one row
    windows: Batch  # a row for each window
    parts: tuple["GridPart", ...]  # in which layers are computed


class GridPart(NamedTuple):
    """Some patches of a view."""

    rows: slice
    batch: Batch  # with these as queries, and all as keys


Mixer = Callable[[GridPart], torch.Tensor]
"""Returns what a layer's attention or convolution makes of some patches: [p, hidden_size]."""


def view_batch(backend: Backend, lengths: Seq[int], device: torch.device) -> Batch:
    """Return a batch whose rows have these lengths and attend to themselves alone."""
    size = backend.block_size
    query_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    num_blocks = -(-query_lens // size)
    firsts = num_blocks.cumsum(0, dtype=torch.int32) - num_blocks
    width = torch.arange(int(num_blocks.max()), dtype=torch.int32, device=device)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    tokens = torch.arange(len(positions), device=device)
    batch = Batch(
        input_ids=tokens,  # nothing reads them
        positions=positions,
        slot_mapping=positions + (firsts * size).repeat_interleave(query_lens),
        cu_seqlens_q=F.pad(query_lens.cumsum(0, dtype=torch.int32), (1, 0)),
        seq_lens=query_lens,
        block_tables=firsts[:, None] + width,
        lengths=HostLengths(tuple(lengths), tuple(lengths)),
        rope_positions=tokens,
    )
    return dataclasses.replace(batch, metadata=backend.plan(batch))


def part_of(batch: Batch, backend: Backend, first: int, end: int) -> Batch:
    """Return a batch with the patches from `first` to `end` of the single row of `batch`."""
    part = dataclasses.replace(
        batch,
        input_ids=batch.input_ids[first:end],
        positions=batch.positions[first:end],
        slot_mapping=batch.slot_mapping[first:end],
        cu_seqlens_q=batch.cu_seqlens_q.clamp(max=end - first),
        lengths=HostLengths((end - first,), (len(batch.positions),)),
    )
    return dataclasses.replace(part, metadata=backend.plan(part))


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


class BoundedLinear(nn.Module):
    """A linear whose inputs and outputs are kept within bounds, if it has any."""

    def __init__(self, linear: LinearBase, *, bounded: bool) -> None:
        super().__init__()
        self.linear = linear
        self.bounded = bounded
        if bounded:
            self.input_min, self.input_max, self.output_min, self.output_max = (
                nn.Parameter(torch.empty(1)) for _ in range(4)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.bounded:
            return self.linear(x)
        return self.linear(x.clamp(self.input_min, self.input_max)).clamp(
            self.output_min, self.output_max
        )


class BoundedLinears(nn.ModuleDict):
    """Bounded linears with the same input, by their names in the checkpoint: their outputs lie side
    by side.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([linear(x) for linear in self.values()], dim=1)


def turned_rows(num_heads: int, head_dim: int, name: str = "") -> list[TensorRows]:
    """Return the rows of heads, whose checkpoint rotates pairs of each half alone, in the order in
    which the pairs are those of `rotated`: rows' pairs, then columns'.
    """
    size = head_dim // 4
    total = num_heads * head_dim
    starts = range(0, total, head_dim)
    return [
        TensorRows(name, total, start + quarter * size, size)
        for start in starts
        for quarter in (2, 0, 3, 1)
    ]


class TurnedNorm(RMSNorm):
    """The RMSNorm of heads of `turned_rows`."""

    def __init__(self, head_dim: int, eps: float) -> None:
        super().__init__(head_dim, eps, NORM_WIDE)

    def shards(self, prefix: str) -> Iterator[Shard]:
        """Yield the parts of the weight in their order."""
        rows = turned_rows(1, len(self.weight))
        for part, target in zip(rows, self.weight.data.view(len(rows), -1), strict=True):
            yield Shard(f"{prefix}.weight", (part.total,), target, start=part.start)


class TowerAttention(nn.Module):
    """Attention of the patches of a view to each other.

    Args:
        fused: whether the checkpoint has one matrix for queries, keys and values.
        windowed: whether patches attend to those of their window only.
    """

    def __init__(self, config: TowerConfig, *, fused: bool, windowed: bool) -> None:
        super().__init__()
        size = config.hidden_size
        head_dim = config.head_dim
        outputs = {"q_proj": size, "k_proj": config.kv_size, "v_proj": config.kv_size}
        norm: type[RMSNorm] = RMSNorm if config.bounded is None else TurnedNorm
        self.qkv: nn.Module
        if config.bounded is None:
            slices = {name: OutputSlice(part, 0, part) for name, part in outputs.items()}
            self.qkv = ColumnParallelLinear(size, slices, bias=config.bias, fused=fused)
        else:
            linears = {
                name: LinearBase(size, part)
                if name == "v_proj"
                else PiecedLinear(size, turned_rows(part // head_dim, head_dim, "linear"))
                for name, part in outputs.items()
            }
            self.qkv = BoundedLinears({name: config.bound(each) for name, each in linears.items()})
        self.proj = config.bound(LinearBase(size, size, bias=config.bias))
        self.q_norm = norm(head_dim, config.eps) if config.qk_norm else None
        self.k_norm = norm(head_dim, config.eps) if config.qk_norm else None
        self.eps = config.eps
        self.v_norm = config.v_norm
        self.windowed = windowed

    def forward(self, x: torch.Tensor, grid: Grid) -> Mixer:
        """Read `x` [P, hidden_size]."""
        norm = QKNormRope(None, None, self.eps, grid.angles, v_norm=self.v_norm)
        if self.q_norm is not None and self.k_norm is not None:
            weights = self.q_norm.weight, self.k_norm.weight
            norm = QKNormRope(*weights, self.eps, grid.angles, self.q_norm.kind, v_norm=self.v_norm)
        backend = grid.backend
        cache = grid.kv_cache
        if self.windowed:
            found = backend.forward(self.qkv(x), norm, cache, grid.windows)
            return lambda part: self.proj(found[part.rows].flatten(1))
        q = backend.store(self.qkv(x), norm, cache, grid.whole)
        return lambda part: self.proj(backend.attend(q[part.rows], cache, part.batch).flatten(1))


class GridConvolution(nn.Module):
    """A convolution of each channel over the grid of patches, with a gate before it and one after
    it.
    """

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        size = config.hidden_size
        kernel = config.kernel_size
        self.merge = config.merge
        self.in_proj = LinearBase(size, 3 * size)
        self.conv = nn.Conv2d(size, size, kernel, padding=kernel // 2, groups=size, bias=False)
        self.out_proj = LinearBase(size, size)

    def forward(self, x: torch.Tensor, grid: Grid) -> Mixer:
        """Read `x` [P, hidden_size]."""
        before, after, values = self.in_proj(x).chunk(3, dim=1)
        merge = self.merge
        rows, columns = grid.rows // merge, grid.columns // merge
        blocks = (before * values).view(rows, columns, merge, merge, -1)
        raster = blocks.permute(4, 0, 2, 1, 3).reshape(-1, grid.rows, grid.columns)
        found = self.conv(raster.unsqueeze(0)).view(-1, rows, merge, columns, merge)
        gated = after * found.permute(1, 3, 2, 4, 0).reshape(x.shape)
        return lambda part: self.out_proj(gated[part.rows])


class TowerMLP(nn.Module):
    """Two linears with an activation between them, or a gated linear unit."""

    kernels: Kernels = TORCH

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        size = config.intermediate_size
        self.fc1: nn.Module = LinearBase(config.hidden_size, size, bias=config.bias)
        self.gated = config.gated
        names = "gate_proj", "up_proj"
        if config.gated and config.bounded is not None:
            linears = {name: config.bound(LinearBase(config.hidden_size, size)) for name in names}
            self.fc1 = BoundedLinears(linears)
        elif config.gated:
            slices = {name: OutputSlice(size, 0, size) for name in names}
            self.fc1 = ColumnParallelLinear(config.hidden_size, slices, bias=config.bias)
        self.fc2 = config.bound(LinearBase(size, config.hidden_size, bias=config.bias))
        self.activation = config.activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        act = self.kernels.act_and_mul if self.gated else self.kernels.act
        return self.fc2(act(self.fc1(x), self.activation))


def optional_norm(config: TowerConfig, is_there: bool) -> nn.Module:
    """Return a norm of states, or what leaves them as they are."""
    return config.norm(config.hidden_size, config.eps) if is_there else nn.Identity()


class TowerLayer(nn.Module):
    """Attention, or a convolution, and an MLP, each after a norm, and added to what it reads."""

    kernels: Kernels = TORCH

    def __init__(self, config: TowerConfig, index: int, *, fused: bool) -> None:
        super().__init__()
        self.norm1 = config.norm(config.hidden_size, config.eps)
        self.attn: nn.Module
        if index in config.convolved:
            self.attn = GridConvolution(config)
        else:
            windowed = index in config.windowed
            self.attn = TowerAttention(config, fused=fused, windowed=windowed)
        self.norm2 = config.norm(config.hidden_size, config.eps)
        self.mlp = TowerMLP(config)
        self.after_attn = optional_norm(config, config.sandwich)
        self.after_mlp = optional_norm(config, config.sandwich)

    def forward(self, hidden: torch.Tensor, grid: Grid) -> Iterator[None]:
        """Change `hidden` [P, hidden_size]: yield between two parts.

        A patch's bits do not depend on what the parts are.
        """
        x, _ = self.norm1.add_norm(None, hidden)
        mixer: Mixer = self.attn(x, grid)
        for part in grid.parts:
            if len(grid.parts) > 1:
                yield
            x, changed = self.norm2.add_norm(self.after_attn(mixer(part)), hidden[part.rows])
            self.kernels.add(self.after_mlp(self.mlp(x)), changed)


class Merger(nn.Module):
    """Makes an embedding of neighbouring patches: norm, linear, activation, linear.

    Args:
        group: how many patches, which lie one after the other, become an embedding.
        norm: of a patch, or of the whole group; None: none.
        inner_size: of what is between the linears; None: as of the group.
        mixes: whether a linear first makes a patch of the group, whose numbers lie channel by
            channel.
    """

    kernels: Kernels = TORCH

    def __init__(
        self,
        config: TowerConfig,
        group: int,
        output_size: int,
        norm: Norm | None,
        *,
        inner_size: int | None = None,
        bias: bool = True,
        activation: str = "gelu",
        mixes: bool = False,
    ) -> None:
        super().__init__()
        self.group = group
        self.size = config.hidden_size * group
        self.output_size = output_size
        self.norm = norm
        self.mixer = LinearBase(self.size, config.hidden_size) if mixes else None
        size = config.hidden_size if mixes else self.size
        inner_size = inner_size or size
        self.linear_fc1 = LinearBase(size, inner_size, bias=bias)
        self.linear_fc2 = LinearBase(inner_size, output_size, bias=bias)
        self.activation = activation

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [P / group, output_size] for `hidden` [P, hidden_size]."""
        x = hidden
        if self.norm is not None:
            x, _ = self.norm.add_norm(None, hidden.view(-1, self.norm.weight.shape[0]))
        x = x.view(-1, self.size)
        if self.mixer is not None:
            x = self.mixer(x.view(len(x), self.group, -1).transpose(1, 2).flatten(1))
        return self.linear_fc2(self.kernels.act(self.linear_fc1(x), self.activation))


class PooledMerger(nn.Module):
    """Makes an embedding of the mean of neighbouring patches: norm, linear.

    Args:
        group: how many patches, which lie one after the other, become an embedding.
        norm: None: an RMSNorm without weight.
        scale: factor on the means.
        standardized: whether learned numbers are then taken off, and others multiply the rest.
        transposed: whether checkpoints have the linear's weight as [inputs, outputs].
    """

    kernels: Kernels = TORCH

    def __init__(
        self,
        config: TowerConfig,
        group: int,
        output_size: int,
        norm: Norm | None = None,
        *,
        eps: float = 1e-6,
        scale: float = 1.0,
        standardized: bool = False,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        size = config.hidden_size
        self.group = group
        self.output_size = output_size
        self.norm = norm
        self.eps = eps
        self.scale = scale
        self.std_bias = nn.Parameter(torch.empty(size)) if standardized else None
        self.std_scale = nn.Parameter(torch.empty(size)) if standardized else None
        self.linear = LinearBase(size, output_size)
        self.linear.transposed = transposed

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [P / group, output_size] for `hidden` [P, hidden_size]."""
        means = hidden.view(-1, self.group, hidden.shape[1]).float().mean(1).to(hidden.dtype)
        wide = means.float() * self.scale
        if self.std_bias is not None and self.std_scale is not None:
            wide = (wide - self.std_bias.float()) * self.std_scale.float()
        x = wide.to(hidden.dtype)
        x = self.kernels.rms_norm(x, None, self.eps) if self.norm is None else self.norm(x)
        return self.linear(x)


class SummedTables(nn.Module):
    """A learned vector for each column, and one for each row, which are added.

    Args:
        length: of each table.
        merge: patches lie in blocks of merge x merge.
        by_table: whether a checkpoint has one table after the other, not place after place.
    """

    def __init__(self, length: int, hidden_size: int, merge: int, *, by_table: bool) -> None:
        super().__init__()
        shape = (2, length) if by_table else (length, 2)
        self.weight = nn.Parameter(torch.empty(*shape, hidden_size))
        self.merge = merge
        self.by_table = by_table

    def forward(self, rows: int, columns: int) -> torch.Tensor:
        """Return [P, hidden_size] float32, for rows x columns patches."""
        y, x = block_places(rows, columns, self.merge, self.weight.device)
        of_columns, of_rows = self.weight.unbind(0 if self.by_table else 1)
        return of_columns[x.long()].float() + of_rows[y.long()].float()


class LearnedGrid(nn.Module):
    """Learned vectors of places on a square, drawn out to the sides of a view: bilinear.

    Args:
        num_places: a square number.
        merge: patches lie in blocks of merge x merge.
        antialias: whether a vector covers its share of the side, as a pixel does, and those of many
            places are averaged; otherwise corners stay corners.
    """

    def __init__(
        self, num_places: int, hidden_size: int, merge: int, *, antialias: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_places, hidden_size))
        self.side = math.isqrt(num_places)
        self.merge = merge
        self.antialias = antialias

    def forward(self, rows: int, columns: int) -> torch.Tensor:
        """Return [P, hidden_size] float32, for rows x columns patches."""
        y, x = block_places(rows, columns, self.merge, self.weight.device)
        if self.antialias:
            square = self.weight.float().T.reshape(1, -1, self.side, self.side)
            size = (rows, columns)
            drawn = F.interpolate(square, size, mode="bilinear", antialias=True)
            return drawn[0].flatten(1).T[(y * columns + x).long()]
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


def axial_frequencies(head_dim: int, theta: float) -> torch.Tensor:
    """Return the frequencies [2, head_dim / 4] float32 of rows and of columns, which are equal."""
    return inverse_frequencies(head_dim // 2, theta).expand(2, -1)


def by_windows(
    rows: int, columns: int, side: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an order of rows x columns blocks, [blocks] int64, in which the side x side ones of a
    window come together; and how many blocks each window has, [windows] int64.
    """
    y, x = block_places(rows, columns, 1, device)
    window = (y.long() // side) * math.ceil(columns / side) + x.long() // side
    return window.argsort(stable=True), window.bincount()


class VisionTower(nn.Module):
    """Patches in, embeddings out. Its `attention` is set where it is loaded.

    Args:
        positions: returns what is added to the patches of a grid; None: nothing.
        merger: makes embeddings of the last layer's states.
        deepstack: by layer, what makes embeddings of its states, which are added to the outputs of
            the text model's first layers.
        inv_freq: [2, head_dim / 4] float32, radians per row and per column; None: nothing rotates.
        normed_patches: whether patches are also normalised before their linear and after it.

    Attributes:
        names: patterns of names of tensors, and what a checkpoint has in their places.
        places: prefixes that a checkpoint's names may have.
        parts: what all names begin with after them.
    """

    names: Mapping[str, str]
    places: tuple[str, ...]
    parts: tuple[str, ...] = ("",)
    attention: Backend

    def __init__(
        self,
        config: TowerConfig,
        positions: LearnedGrid | SummedTables | None,
        merger: Merger | PooledMerger,
        deepstack: Mapping[int, Merger] | None = None,
        *,
        inv_freq: torch.Tensor | None = None,
        fused: bool = False,
        normed_patches: bool = False,
    ) -> None:
        super().__init__()
        deepstack = deepstack or {}
        size = config.hidden_size
        self.config = config
        self.patch_embed: nn.Module
        if normed_patches:
            numbers = math.prod(config.patch_shape)
            parts: OrderedDict[str, nn.Module] = OrderedDict()
            parts["norm1"] = config.norm(numbers, config.eps)
            parts["linear"] = LinearBase(numbers, size, bias=config.patch_bias)
            parts["norm2"] = config.norm(size, config.eps)
            self.patch_embed = nn.Sequential(parts)
        else:
            self.patch_embed = PatchLinear(config.patch_shape, size, bias=config.patch_bias)
        self.positions = positions
        self.norm_first = optional_norm(config, config.norm_first)
        self.layers = nn.ModuleList(
            [TowerLayer(config, index, fused=fused) for index in range(config.num_layers)]
        )
        self.norm_last = optional_norm(config, config.norm_last)
        self.merger = merger
        self.deepstack = nn.ModuleList(deepstack.values())
        self.output_size = (1 + len(deepstack)) * merger.output_size  # of an embedding
        self._deepstack_at = tuple(deepstack)
        self._inv_freq = inv_freq

    def attention_spec(self, dtype: torch.dtype, device: torch.device) -> AttentionSpec:
        """Return what the tower needs from a backend."""
        config = self.config
        sizes = config.num_heads, config.num_kv_heads or config.num_heads, config.head_dim
        scale = config.scale
        return AttentionSpec(*sizes, dtype, device, block_size=None, causal=False, scale=scale)

    def encode(
        self, patches: torch.Tensor, rows: int, columns: int, num_parts: int = 1
    ) -> Iterator[torch.Tensor | None]:
        """Yield None after each part of each layer, but after the last one the view's embeddings
        [N, (1 + D) * output_size]: for the text model's input, and to add to the outputs of its
        first D layers.

        Args:
            patches: [P, numbers], of rows x columns patches.
            num_parts: in how many parts each layer is computed: 1, or more than 2.
        """
        hidden = self.patch_embed(patches)
        del patches  # otherwise they would stay until the end
        if self.positions is not None:
            hidden = hidden + self.positions(rows, columns).to(hidden.dtype)
        grid = self._grid(rows, columns, num_parts, hidden.device)
        hidden = self._ordered(self.norm_first(hidden), grid.order)
        deep: list[torch.Tensor] = []  # [N, output_size] each
        for index, layer in enumerate(self.layers):
            if index:
                yield None
            yield from layer(hidden, grid)
            if index in self._deepstack_at:
                deep.append(self.deepstack[self._deepstack_at.index(index)](hidden))
        found = torch.cat([self.merger(self.norm_last(hidden)), *deep], dim=1)
        yield found if grid.order is None else found[grid.order.argsort()]

    def _grid(self, rows: int, columns: int, num_parts: int, device: torch.device) -> Grid:
        """Return the places of rows x columns patches, in the order that they have in layers."""
        config = self.config
        merge = config.merge
        backend = self.attention
        order = None
        whole = windows = view_batch(backend, [rows * columns], device)
        if config.windowed:
            order, blocks = by_windows(rows // merge, columns // merge, config.window, device)
            windows = view_batch(backend, (blocks * merge**2).tolist(), device)
        angles = torch.empty(rows * columns, 0, device=device)
        if self._inv_freq is not None:
            places = block_places(rows, columns, merge, device)
            both = zip(places, self._inv_freq.to(device), strict=True)
            turns = [place[:, None] * inv_freq for place, inv_freq in both]
            together = self._ordered(torch.cat(turns, dim=1), order)
            angles = torch.cat([together.cos(), together.sin()], dim=1)
        num_blocks = 1 + max(int(batch.block_tables[-1].max()) for batch in (whole, windows))
        cache = torch.zeros(
            backend.kv_cache_shape(num_blocks), dtype=backend.spec.dtype, device=device
        )
        num_parts = max(num_parts - 1, 1)  # without that of the keys and values
        ends = [rows * columns * part // num_parts for part in range(num_parts + 1)]
        parts = tuple(
            GridPart(slice(first, end), part_of(whole, backend, first, end))
            for first, end in itertools.pairwise(ends)
        )
        return Grid(rows, columns, angles, order, backend, cache, whole, windows, parts)

    def _ordered(self, x: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
        """Return `x` [P, n] with its blocks in an order."""
        if order is None:
            return x
        return x.view(len(order), -1, x.shape[1])[order].flatten(0, 1)

    def checkpoint_name(self, name: str, known: Collection[str]) -> str:
        """Return the checkpoint's name for tensor `name`. See `Renamed` in loading/shards.py."""
        if name in known:  # an mmproj file has the modules' names
            return name
        for pattern, theirs in self.names.items():
            name = re.sub(pattern, theirs, name)
        names = self.all_names(self.places[0] + name)
        return next((each for each in names if each in known), names[0])

    def all_names(self, name: str) -> list[str]:
        """Return the names that checkpoints may have for the tensor that `checkpoint_name` calls
        `name` where none is known: that first.
        """
        own = name.removeprefix(self.places[0])
        # Files of transformers 4 have a module more around a SigLIP tower.
        both = own, own.replace("vision_tower.", "vision_tower.vision_model.", 1)
        return [place + each for each in both for place in self.places]
