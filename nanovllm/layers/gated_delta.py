"""Gated DeltaNet (arXiv 2412.06464), a layer whose state is a matrix for each head of values, and
Kimi Delta Attention (arXiv 2510.26692), which has a decay for each key channel.

Shapes: T tokens of the step, O of them in `output_indices`, E that change states; H heads of this
rank, with D numbers.
"""

from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import torch
from torch import nn

from nanovllm.attention.batch import Batch
from nanovllm.kernels.states import StatePart
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import RowParallelLinear, divide
from nanovllm.layers.pieces import (
    ChannelConv,
    PiecedLinear,
    SmallLinear,
    TensorRows,
    head_rows,
    head_shards,
    own_rows,
)
from nanovllm.layers.state_layer import StateLayer
from nanovllm.loading.shards import Shard


class DeltaSizes(NamedTuple):
    """The sizes of a gated DeltaNet, of all ranks together."""

    hidden_size: int
    key_heads: int
    value_heads: int  # a multiple of key_heads: neighbours read the same key head
    key_dim: int  # of a head, like value_dim
    value_dim: int
    taps: int  # tokens that the convolution takes


class DeltaRule(StateLayer):
    """Mixes the tokens of a sequence by the gated delta rule.

    What enters it is the causal convolution of queries, keys and values. Its output is normalised,
    multiplied by a gate, and projected. Each rank has some heads of both kinds. A subclass projects
    its input to what decides how a state changes, and to the gate.

    Args:
        eps: of the norm.
        mixed: the pieces of q, k and v, of this rank.
        channels: those of the convolution.
        by_rows: whether each row of a state has its own decay.
    """

    bound: float | None = None  # of the decays: see `torch_states.gated_delta`
    sigmoid: ClassVar[bool] = False  # see `torch_states.gated_rms_norm`

    def __init__(
        self,
        sizes: DeltaSizes,
        eps: float,
        mixed: list[TensorRows],
        channels: list[TensorRows],
        *,
        by_rows: bool,
    ) -> None:
        key_heads = divide(sizes.key_heads, "linear_num_key_heads")
        self.num_heads = heads = divide(sizes.value_heads, "linear_num_value_heads")
        width = 2 * key_heads * sizes.key_dim + heads * sizes.value_dim
        kept = StatePart((sizes.taps - 1, width), torch.get_default_dtype())
        matrix = StatePart((sizes.key_dim, sizes.value_dim), torch.float32)
        scales = [] if by_rows else [StatePart((heads,), torch.float32)]
        super().__init__((kept, *[matrix] * heads, *scales))
        self.in_proj_qkv = PiecedLinear(sizes.hidden_size, mixed)
        self.conv1d = ChannelConv(channels, sizes.taps)
        self.A_log = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        biases = heads * sizes.key_dim if by_rows else heads
        self.dt_bias = nn.Parameter(torch.empty(biases, dtype=torch.float32))
        self.norm = RMSNorm(sizes.value_dim, eps)  # holds the weight and eps
        value_size = sizes.value_heads * sizes.value_dim
        self.out_proj = RowParallelLinear(value_size, sizes.hidden_size, bias=False)

    def changes(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a and b of `torch_states.gated_delta`."""
        raise NotImplementedError

    def gate(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the gate of the output, for each of its numbers."""
        raise NotImplementedError

    def forward(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Change the rows' states; return [O, hidden_size] for `hidden` [T, hidden_size]."""
        assert batch.state is not None
        rows = batch.state
        kernels = self.kernels
        states = self.states
        inputs = self.in_proj_qkv(hidden), *self.changes(hidden)
        mixed, a, b = self.extended(inputs, rows)
        qkv = kernels.causal_conv(mixed, self.conv1d.taps, None, True, states, rows)
        gates = a, b, self.A_log, self.dt_bias
        heads = self.own(kernels.gated_delta(qkv, *gates, states, rows, self.bound), rows)
        heads = batch.outputs(heads)
        gate = self.gate(batch.outputs(hidden)).view(heads.shape)
        norm = self.norm.weight, self.norm.eps
        out = kernels.gated_rms_norm(heads, gate, *norm, sigmoid=self.sigmoid)
        return self.out_proj(out.flatten(1))

    def shards(self, prefix: str) -> Iterator[Shard]:
        yield from head_shards(self, prefix, "A_log", "dt_bias")


class GatedDeltaNet(DeltaRule):
    """The gated delta rule with one decay for each head, and the SiLU of a gate z.

    Args:
        grouped: whether the checkpoint has the projections of a key head and its value heads side
            by side, in in_proj_qkvz and in_proj_ba; else in in_proj_qkv, _z, _b and _a.
    """

    def __init__(self, sizes: DeltaSizes, eps: float, *, grouped: bool = False) -> None:
        parts = grouped_parts(sizes) if grouped else plain_parts(sizes)
        mixed = [*parts["q"], *parts["k"], *parts["v"]]
        channels_of = plain_parts(sizes)
        conv = [piece._replace(name="conv1d") for part in "qkv" for piece in channels_of[part]]
        super().__init__(sizes, eps, mixed, conv, by_rows=False)
        self.in_proj_z = PiecedLinear(sizes.hidden_size, parts["z"])
        self.in_proj_ab = SmallLinear(sizes.hidden_size, [*parts["a"], *parts["b"]])

    def changes(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ab = self.in_proj_ab(hidden)
        return ab[:, : self.num_heads], ab[:, self.num_heads :]

    def gate(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.in_proj_z(hidden)


def plain_parts(sizes: DeltaSizes) -> dict[str, list[TensorRows]]:
    """Return this rank's pieces of q, k, v, z, a and b: a kind's heads are side by side."""
    keys = sizes.key_heads * sizes.key_dim
    values = sizes.value_heads * sizes.value_dim
    total = 2 * keys + values
    return {
        "q": [own_rows("in_proj_qkv", total, 0, keys)],
        "k": [own_rows("in_proj_qkv", total, keys, keys)],
        "v": [own_rows("in_proj_qkv", total, 2 * keys, values)],
        "z": [own_rows("in_proj_z", values)],
        "a": [own_rows("in_proj_a", sizes.value_heads)],
        "b": [own_rows("in_proj_b", sizes.value_heads)],
    }


def grouped_parts(sizes: DeltaSizes) -> dict[str, list[TensorRows]]:
    """Return the same of a checkpoint that has a key head's q, k, v and z side by side."""
    share = sizes.value_heads // sizes.key_heads
    lengths = {"q": sizes.key_dim, "k": sizes.key_dim}
    lengths |= {"v": share * sizes.value_dim, "z": share * sizes.value_dim}
    found: dict[str, list[TensorRows]] = {}
    for name, parts in (("in_proj_qkvz", lengths), ("in_proj_ba", {"b": share, "a": share})):
        group = sum(parts.values())
        before = 0
        for part, size in parts.items():
            found[part] = head_rows(name, sizes.key_heads, group, before, size)
            before += size
    return found


class KimiDeltaAttention(DeltaRule):
    """The gated delta rule with a decay for each channel of a key, and the sigmoid of a gate.

    Args:
        sizes: with equally many heads of keys and of values, of the same size.
        low_rank: whether a token's decays, and its gate, come from D numbers of the token, by two
            projections; else by one.
        bound: of the decays, see `torch_states.gated_delta`.
        wide_log: whether the checkpoint has A_log as [1, 1, all heads, 1].
    """

    sigmoid: ClassVar[bool] = True

    def __init__(
        self,
        sizes: DeltaSizes,
        eps: float,
        *,
        low_rank: bool,
        bound: float | None = None,
        wide_log: bool = False,
    ) -> None:
        mixed, channels = (
            [_own(f"{part}_{kind}", sizes) for part in "qkv"] for kind in ("proj", "conv1d")
        )
        super().__init__(sizes, eps, mixed, channels, by_rows=True)
        self.bound = bound
        self._wide_log = wide_log
        make = LowRank if low_rank else _full
        self.f = make("f", sizes)
        self.g = make("g", sizes)
        self.b = SmallLinear(sizes.hidden_size, [own_rows("b_proj", sizes.value_heads)])

    def changes(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.f(hidden), self.b(hidden)

    def gate(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.g(hidden)

    def shards(self, prefix: str) -> Iterator[Shard]:
        log, bias = super().shards(prefix)
        if self._wide_log:
            shape = (1, 1, *log.shape, 1)
            log = Shard(log.name, shape, log.target.view(1, 1, -1, 1), dim=2, start=log.start)
        yield from (log, bias)


class LowRank(nn.Module):
    """Two linears, one after the other, of which the first has D outputs.

    Args:
        name: of the checkpoint's linears before "_a_proj" and "_b_proj".
    """

    def __init__(self, name: str, sizes: DeltaSizes) -> None:
        super().__init__()
        rank = sizes.key_dim
        self.a = SmallLinear(sizes.hidden_size, [TensorRows(f"{name}_a_proj", rank, 0, rank)])
        self.b = SmallLinear(rank, [_own(f"{name}_b_proj", sizes)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [T, H * D] for `hidden` [T, hidden_size]."""
        return self.b(self.a(hidden))


def _full(name: str, sizes: DeltaSizes) -> PiecedLinear:
    return PiecedLinear(sizes.hidden_size, [_own(f"{name}_proj", sizes)])


def _own(name: str, sizes: DeltaSizes) -> TensorRows:
    """Return this rank's rows of a checkpoint tensor that has D rows for each head."""
    return own_rows(name, sizes.value_heads * sizes.value_dim)
