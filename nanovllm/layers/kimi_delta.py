"""Kimi Delta Attention (arXiv 2510.26692): a gated delta rule with a decay for each key channel.

Shapes: T tokens of the step, H heads of this rank, with D numbers.
"""

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import nn

from nanovllm.layers.gated_delta import DeltaRule, DeltaSizes
from nanovllm.layers.pieces import PiecedLinear, SmallLinear, TensorRows
from nanovllm.loading.shards import Shard
from nanovllm.utils.distributed import tensor_parallel


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
        heads = self.num_heads
        start = heads * tensor_parallel().rank
        self.b = SmallLinear(
            sizes.hidden_size, [TensorRows("b_proj", sizes.value_heads, start, heads)]
        )

    def changes(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.f(hidden), self.b(hidden)

    def gate(self, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.g(hidden)
        return found

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
    ranks = tensor_parallel()
    total = sizes.value_heads * sizes.value_dim
    size = total // ranks.size
    return TensorRows(name, total, size * ranks.rank, size)
