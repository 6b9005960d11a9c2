"""Mixture of experts in place of an MLP: a router chooses a few of E experts for each token.

Every rank has a part of each expert: its intermediate size is split.
Shapes: T tokens, E experts, k experts per token.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from nanovllm.kernels.torch_experts import ExpertChoice, ExpertLinear, ExpertMLP, Routing
from nanovllm.kernels.torch_kernels import TORCH, Kernels
from nanovllm.layers.linear import WeightModule, divide
from nanovllm.layers.pieces import SmallLinear, TensorRows
from nanovllm.loading.shards import Shard
from nanovllm.utils.distributed import all_reduce, tensor_parallel

MAX_EXPERTS = 2**12  # more than any model has: a limit for what a config.json says


class Router(WeightModule):
    """A linear that scores the experts, and the choice of k of them.

    Args:
        bias: whether the linear has one.
        wide: whether the weight is kept in float32, and the logits are computed in float32.
        choice_bias: whether each expert has a number that is added to its score for the choice.
        bias_index: where that is in its checkpoint tensor, if this has one dimension more.
        choice: see `ExpertChoice`.
    """

    kernels: Kernels = TORCH  # the loader sets those of the device

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        bias: bool = False,
        wide: bool = False,
        choice_bias: bool = False,
        bias_index: int | None = None,
        **choice: Any,
    ) -> None:
        super().__init__(num_experts, hidden_size)
        assert self.weight is not None
        if wide:
            self.weight.data = self.weight.data.float()
        self.is_gathered = self.is_wide = wide
        self.bias = nn.Parameter(torch.empty(num_experts)) if bias else None
        empty = torch.empty(num_experts, dtype=torch.float32)
        self.expert_bias = nn.Parameter(empty) if choice_bias else None
        self.bias_index = bias_index
        self.choice = ExpertChoice(top_k, **choice)

    def forward(self, x: torch.Tensor, scales: torch.Tensor | None = None) -> Routing:
        """Return the experts of `x` [T, hidden_size].

        Args:
            scales: [E], factors of the experts' weights.
        """
        choice = self.choice._replace(scales=scales, bias=self.expert_bias)
        return self.kernels.route(self._logits(x), choice)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_wide:
            assert self.weight is not None
            return self.kernels.wide_linear(x, self.weight)
        return self.linear(x, self.bias)

    def shards(self, prefix: str) -> Iterator[Shard]:
        for name, parameter in (("weight", self.weight), ("bias", self.bias)):
            if parameter is not None:
                yield Shard(f"{prefix}.{name}", tuple(parameter.shape), parameter.data)
        if self.expert_bias is not None:
            index = self.bias_index
            shape = self.expert_bias.shape if index is None else (index + 1, self.output_size)
            name = f"{prefix.rpartition('.')[0]}.expert_bias"
            yield Shard(name, tuple(shape), self.expert_bias.data, index=index)


class NormedRouter(nn.Module):
    """Gemma 4's router: it scores the RMSNorm of its input, and each expert's weight has a factor.

    Args:
        eps: of the norm.
    """

    kernels: Kernels = TORCH  # the loader sets those of the device

    def __init__(self, hidden_size: int, num_experts: int, top_k: int, eps: float) -> None:
        super().__init__()
        self.proj = Router(
            hidden_size, num_experts, top_k, renormalize=True, logit_factor=hidden_size**-0.5
        )
        self.scale = nn.Parameter(torch.empty(hidden_size))
        self.per_expert_scale = nn.Parameter(torch.empty(num_experts))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> Routing:
        """Return the experts of `x` [T, hidden_size]."""
        normed = self.kernels.add_rms_norm(None, x, self.scale, self.eps)
        return self.proj(normed, self.per_expert_scale)


class StoredExperts(NamedTuple):
    """How a checkpoint stores the experts of a layer."""

    # Names of the three linears of each expert, after its number. None: all experts are together in
    # the tensors gate_up_proj [E, 2 * intermediate_size, hidden_size] and down_proj [E,
    # hidden_size, intermediate_size]; without a gate, in up_proj and down_proj.
    linears: tuple[str, str, str] | None = ("gate_proj", "up_proj", "down_proj")
    transposed: bool = False  # tensors of all experts have the inputs before the outputs
    either: bool = False  # or they have not: their shapes say so
    interleaved: bool = False  # in gate_up_proj, gates and ups are in turn, not all gates first


PER_EXPERT = StoredExperts()


class StackedLinear(WeightModule):
    """The same linear of E experts: their weights [outputs, inputs] one after the other."""

    is_gathered = True

    def __init__(
        self,
        num_experts: int,
        output_size: int,
        input_size: int,
        stored: StoredExperts,
        *,
        bias: bool,
    ) -> None:
        super().__init__(num_experts * output_size, input_size)
        self.bias = nn.Parameter(torch.empty(num_experts * output_size)) if bias else None
        self.num_experts = num_experts
        self.num_outputs = output_size
        self.stored_as = stored

    def parts(self) -> ExpertLinear:
        """Return the weights for the kernels."""
        weight = self.method if self.weight is None else self.weight
        assert weight is not None
        return ExpertLinear(weight, self.bias, self.num_outputs)

    def part_shards(
        self, prefix: str, names: tuple[str, str], rows: slice, size: int, start: int, dim: int
    ) -> Iterator[Shard]:
        """Yield all experts' shards of a linear, or of the gates or the ups of a merged one.

        Args:
            names: of an expert's linear, and of the tensor of all experts.
            rows: of each expert here.
            size: of dimension `dim` of the whole linear; this rank's part begins at `start`.
            dim: 0: the outputs are split over the ranks; 1: the inputs.
        """
        assert self.weight is not None
        linear, stacked = names
        parent = prefix.rpartition(".")[0]
        transposed = self.stored_as.transposed
        weights = self.weight.data.view(self.num_experts, self.num_outputs, -1)[:, rows]
        shape: tuple[int, ...] = (size, weights.shape[2]) if dim == 0 else (weights.shape[1], size)
        stored_shape = shape[::-1] if transposed else shape
        bias_start = start if dim == 0 else 0
        together = self.stored_as.linears is None
        experts: tuple[int, ...] = (self.num_experts,) if together else ()
        suffix, bias_suffix = ("", "_bias") if together else (".weight", ".bias")
        for expert in range(self.num_experts):
            path = f"{parent}.{stacked}" if together else f"{parent}.{expert}.{linear}"
            index = expert if together else None
            found = (*experts, *stored_shape)
            target = weights[expert]
            either = self.stored_as.either
            yield from self.weight_shards(
                Shard(path + suffix, found, target, dim, start, index, transposed, either=either)
            )
            if self.bias is not None:
                bias = self.bias.data.view(self.num_experts, -1)[expert, rows]
                yield Shard(path + bias_suffix, (*experts, shape[0]), bias, 0, bias_start, index)


class GateUp(StackedLinear):
    """The gates and the ups of E experts, or the ups alone. Each rank has some of both."""

    def __init__(self, *args: Any, gated: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self.gated = gated

    def shards(self, prefix: str) -> Iterator[Shard]:
        own = self.num_outputs // (2 if self.gated else 1)
        total = own * tensor_parallel().size
        start = tensor_parallel().rank * own
        if self.stored_as.interleaved:
            rows = slice(2 * own)
            names = ("", "gate_up_proj")
            yield from self.part_shards(prefix, names, rows, 2 * total, 2 * start, 0)
            return
        linears = self.stored_as.linears
        size = 2 * total if self.gated and linears is None else total
        for i, name in enumerate((linears or ("", ""))[0 if self.gated else 1 : 2]):
            first = start + i * total if linears is None else start
            rows = slice(i * own, (i + 1) * own)
            names = (name, "gate_up_proj" if self.gated else "up_proj")
            yield from self.part_shards(prefix, names, rows, size, first, 0)


class Down(StackedLinear):
    """The last linear of E experts. Each rank reads some of the inputs."""

    def shards(self, prefix: str) -> Iterator[Shard]:
        assert self.weight is not None
        own = self.weight.shape[1]
        size = own * tensor_parallel().size
        start = own * tensor_parallel().rank
        name = (self.stored_as.linears or ("", "", ""))[2]
        yield from self.part_shards(prefix, (name, "down_proj"), slice(None), size, start, 1)


class Experts(nn.Module):
    """The MLPs of E experts: down(activation(gate(x)) * up(x)), or down(activation(up(x))).

    Args:
        gated: whether they have a gate.
        activation: "silu", "gelu_tanh", "swiglu_oai" with a gate, or "relu2".
        bias: whether the linears have one.
    """

    kernels: Kernels = TORCH  # the loader sets those of the device

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        gated: bool = True,
        activation: str = "silu",
        bias: bool = False,
        stored: StoredExperts = PER_EXPERT,
    ) -> None:
        super().__init__()
        size = divide(intermediate_size, "intermediate size of an expert")
        outputs = 2 * size if gated else size
        self.gate_up_proj = GateUp(
            num_experts, outputs, hidden_size, stored, bias=bias, gated=gated
        )
        self.down_proj = Down(num_experts, hidden_size, size, stored, bias=bias)
        self.activation = activation
        self.size = size
        self.gated = gated
        self.interleaved = stored.interleaved

    def forward(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Return the weighted sums of the experts' outputs for `x` [T, hidden_size]."""
        down = self.down_proj.parts()
        if tensor_parallel().rank:
            down = down._replace(bias=None)  # the sum over the ranks must contain it once
        gate_up = self.gate_up_proj.parts()
        mlp = ExpertMLP(gate_up, down, self.activation, self.interleaved, self.gated)
        return all_reduce(self.kernels.experts(x, routing, mlp))


class SparseMLP(nn.Module):
    """A router and its experts, in place of an MLP."""

    def __init__(self, router: Router, experts: Experts) -> None:
        super().__init__()
        self.gate = router
        self.experts = experts

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.experts(hidden, self.gate(hidden))


class SharedExpertMLP(SparseMLP):
    """Experts, and an MLP for all tokens, whose output may be gated for each token.

    Args:
        shared_expert: maps [T, hidden_size] to [T, hidden_size].
        gated: whether its output is multiplied by the sigmoid of a projection of the input.
    """

    kernels: Kernels = TORCH

    def __init__(
        self,
        router: Router,
        experts: Experts,
        shared_expert: nn.Module,
        *,
        gated: bool = False,
    ) -> None:
        super().__init__(router, experts)
        self.shared_expert = shared_expert
        assert router.weight is not None
        gate = [TensorRows("shared_expert_gate", 1, 0, 1)]
        hidden_size = router.weight.shape[1]
        self.shared_expert_gate = SmallLinear(hidden_size, gate) if gated else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        total = super().forward(hidden)
        shared = self.shared_expert(hidden)
        if self.shared_expert_gate is not None:
            shared = self.kernels.mul_act(self.shared_expert_gate(hidden), shared, "sigmoid")
        self.kernels.add(shared, total)
        return total
