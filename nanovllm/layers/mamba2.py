"""Mamba-2 (arXiv 2405.21060): a layer whose state is a matrix for each head.

Shapes: T tokens of the step, O of them in `output_indices`, E that change states.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from nanovllm.attention.batch import Batch
from nanovllm.errors import ConfigError
from nanovllm.kernels.states import StatePart
from nanovllm.kernels.torch_kernels import TORCH, Kernels
from nanovllm.layers.linear import RowParallelLinear, divide
from nanovllm.layers.pieces import ChannelConv, PiecedLinear, SmallLinear, TensorRows, head_shards
from nanovllm.layers.state_layer import StateLayer
from nanovllm.loading.shards import Shard
from nanovllm.utils.distributed import all_reduce, tensor_parallel


class MambaSizes(NamedTuple):
    """The sizes of a Mamba-2 layer, of all ranks together."""

    hidden_size: int
    heads: int  # a multiple of groups: neighbours read the same group
    head_dim: int
    groups: int
    state_size: int  # rows of a head's matrix, which has head_dim columns
    taps: int  # tokens that the convolution takes


class GatedNorm(nn.Module):
    """An RMSNorm of each group of channels, with the SiLU of a gate.

    Each rank has some channels. Those of a group may be on several ranks.

    Args:
        gate_first: normalise the product with the gate, instead of multiplying the norm by it.
    """

    kernels: Kernels = TORCH

    def __init__(self, channels: int, groups: int, eps: float, *, gate_first: bool) -> None:
        super().__init__()
        self._sizes = channels, groups
        self.weight = nn.Parameter(torch.empty(channels // tensor_parallel().size))
        self.eps = eps
        self.gate_first = gate_first

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return the gated norm of `x` with `gate`, [O, this rank's channels] each, contiguous."""
        channels, groups = self._sizes
        size = channels // groups
        if size > x.shape[1]:
            return self._over_ranks(x, gate)
        x, gate = (each.view(len(each), -1, size) for each in (x, gate))
        weight = self.weight.data.view(-1, size)
        normed = self.kernels.gated_rms_norm(x, gate, weight, self.eps, self.gate_first)
        return normed.flatten(1)

    def _over_ranks(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        channels, groups = self._sizes
        ranks = tensor_parallel()
        silu = nn.functional.silu(gate.float())
        wide = x.float() * silu if self.gate_first else x.float()
        squares = wide.new_zeros(len(x), groups)
        group = ranks.rank * groups // ranks.size
        squares[:, group] = wide.square().sum(-1)
        mean = all_reduce(squares)[:, group, None] * groups / channels
        normed = (wide * torch.rsqrt(mean + self.eps)).to(x.dtype) * self.weight
        return normed if self.gate_first else (normed * silu).to(x.dtype)

    def shards(self, prefix: str) -> Iterator[Shard]:
        yield from head_shards(self, prefix, "weight")


class Mamba2(StateLayer):
    """Mixes the tokens of a sequence by Mamba-2's recurrence: see `torch_states.mamba2`.

    What enters it is the causal convolution of x, B and C. Its output is normalised with a gate z
    and projected. Each rank has some heads, and the B and C of their groups.

    Args:
        limits: the smallest and the largest step, softplus(dt + dt_bias).
        eps: of the norm; None: there is none, and the output is multiplied by the SiLU of z.
        gate_first: see `GatedNorm`.
        conv_bias: whether the convolution has a bias.
        bias: whether in_proj has one.
        output_bias: whether out_proj has one.
        factors: on the outputs z, x, B, C and dt of in_proj.
    """

    def __init__(
        self,
        sizes: MambaSizes,
        limits: tuple[float, float],
        eps: float | None,
        *,
        gate_first: bool = True,
        conv_bias: bool = True,
        bias: bool = False,
        output_bias: bool = False,
        factors: Sequence[float] = (1.0,) * 5,
    ) -> None:
        self.num_heads = heads = divide(sizes.heads, "number of Mamba-2 heads")
        parts = mamba_parts(sizes, "in_proj")
        mixed = [*parts["x"], *parts["b"], *parts["c"]]
        channels = sum(piece.size for piece in mixed)
        kept = StatePart((sizes.taps - 1, channels), torch.get_default_dtype())
        matrix = StatePart((sizes.state_size, sizes.head_dim), torch.float32)
        super().__init__((kept, *[matrix] * heads))
        self.limits = limits
        self.factors = tuple(factors)
        hidden_size = sizes.hidden_size
        self.in_proj_z = PiecedLinear(hidden_size, parts["z"], bias=bias)
        self.in_proj_xbc = PiecedLinear(hidden_size, mixed, bias=bias)
        self.in_proj_dt = SmallLinear(hidden_size, parts["dt"], bias=bias)
        inner_size = sizes.heads * sizes.head_dim
        total = inner_size + 2 * sizes.groups * sizes.state_size
        conv = [TensorRows("conv1d", total, each.start - inner_size, each.size) for each in mixed]
        self.conv1d = ChannelConv(conv, sizes.taps, bias=conv_bias)
        self.A_log = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.D = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.norm = None
        if eps is not None:
            self.norm = GatedNorm(inner_size, sizes.groups, eps, gate_first=gate_first)
        self.out_proj = RowParallelLinear(inner_size, hidden_size, bias=output_bias)

    def forward(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Change the rows' states; return [O, hidden_size] for `hidden` [T, hidden_size]."""
        assert batch.state is not None
        rows = batch.state
        kernels = self.kernels
        states = self.states
        mixed, dt = self.extended(self.inputs(hidden), rows)
        xbc = kernels.causal_conv(mixed, self.conv1d.taps, self.conv1d.bias, True, states, rows)
        fixed = self.A_log, self.D, self.dt_bias, self.limits
        heads = self.own(kernels.mamba2(xbc, dt, *fixed, states, rows), rows)
        z = self.gate(batch.outputs(hidden))
        out = batch.outputs(heads).flatten(1)
        gated = kernels.mul_act(z, out, "silu") if self.norm is None else self.norm(out, z)
        return self.out_proj(gated)

    def inputs(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x, B and C side by side, and dt: [T, any] for `hidden` [T, hidden_size]."""
        mixed = self.in_proj_xbc(hidden)
        dt = self.in_proj_dt(hidden)
        inner_size = self.num_heads * self.parts[1].shape[1]
        group_size = (mixed.shape[1] - inner_size) // 2
        parts = *mixed.split_with_sizes([inner_size, group_size, group_size], dim=1), dt
        for part, factor in zip(parts, self.factors[1:], strict=True):
            self._scale(part, factor)
        return mixed, dt

    def gate(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return z, [O, channels] for `hidden` [O, hidden_size]."""
        z = self.in_proj_z(hidden)
        self._scale(z, self.factors[0])
        return z

    def _scale(self, x: torch.Tensor, factor: float) -> None:
        if factor != 1.0:
            self.kernels.scale(x, factor)

    def shards(self, prefix: str) -> Iterator[Shard]:
        yield from head_shards(self, prefix, "A_log", "D", "dt_bias")


def mamba_parts(sizes: MambaSizes, name: str) -> dict[str, list[TensorRows]]:
    """Return this rank's pieces of z, x, B, C and dt, which follow one another in linear `name`.

    Raises:
        ConfigError: neither the number of groups nor that of ranks is a multiple of the other.
    """
    ranks = tensor_parallel()
    groups = sizes.groups
    if groups % ranks.size and ranks.size % groups:
        raise ConfigError(
            f"tensor_parallel_size {ranks.size} does not divide this model's number of Mamba-2 "
            f"groups ({groups}), and is no multiple of it"
        )
    inner_size = sizes.heads * sizes.head_dim
    widths = {"z": inner_size, "x": inner_size}
    widths |= dict.fromkeys("bc", groups * sizes.state_size) | {"dt": sizes.heads}
    total = sum(widths.values())
    found: dict[str, list[TensorRows]] = {}
    before = 0
    for part, width in widths.items():
        copies = max(1, ranks.size // groups) if part in "bc" else 1  # of each piece
        own = width * copies // ranks.size
        found[part] = [TensorRows(name, total, before + ranks.rank // copies * own, own)]
        before += width
    return found
