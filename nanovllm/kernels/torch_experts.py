"""Mixture of experts in plain torch: for every device and dtype, and the reference of the kernels.

Shapes: T tokens, E experts, k experts of a token.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from nanovllm.kernels.torch_math import activate, swiglu_oai

if TYPE_CHECKING:
    from nanovllm.kernels.torch_kernels import LinearMethod

ACTIVATIONS = ("silu", "gelu_tanh", "swiglu_oai", "relu2")
"""Of gate and up, or of experts without a gate. Their places here are their numbers in the kernels.
"swiglu_oai" needs a gate."""


class Routing(NamedTuple):
    """Each token's experts."""

    ids: torch.Tensor  # [T, k] int32, the likeliest expert first; all different in a row
    weights: torch.Tensor  # [T, k] float32: the factors of the experts' outputs


class Groups(NamedTuple):
    """Experts in groups of equal size, of which some are kept: the others are not chosen.

    DeepSeek-V2 (arXiv 2405.04434) has them to limit the devices of a token's experts.
    """

    number: int
    kept: int  # a token's groups: those with the highest scores
    best: int  # 1 or 2: a group's score is the sum of so many of its highest scores


class ExpertChoice(NamedTuple):
    """How the experts of each token are chosen, and weighted."""

    top_k: int
    renormalize: bool  # whether the weights of the chosen experts are divided by their sum
    factor: float = 1.0  # of the weights
    scales: torch.Tensor | None = None  # [E]: factors of the experts' weights
    # Whether each expert has the sigmoid of its own logit, not a part of a softmax over all.
    sigmoid: bool = False
    # [E] float32: added to the sigmoids, or to the softmax, for the choice alone.
    bias: torch.Tensor | None = None
    epsilon: float = 0.0  # added to the sum if `renormalize`
    groups: Groups | None = None
    logit_factor: float = 1.0  # of the logits in a softmax


class ExpertLinear(NamedTuple):
    """The same linear of E experts, one after the other."""

    weight: "torch.Tensor | LinearMethod"  # [E * num_outputs, inputs]
    bias: torch.Tensor | None  # [E * num_outputs]
    num_outputs: int  # of one expert

    def of(self, expert: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the weight [num_outputs, inputs] of one expert, and its bias [num_outputs]."""
        start = expert * self.num_outputs
        end = (expert + 1) * self.num_outputs
        bias = None if self.bias is None else self.bias[start:end]
        if isinstance(self.weight, torch.Tensor):
            return self.weight[start:end], bias
        return self.weight.embedding(torch.arange(start, end, device=device)), bias


class ExpertMLP(NamedTuple):
    """The MLPs of E experts: down(activation(gate(x)) * up(x)), or down(activation(up(x)))."""

    # An expert's gates, then its ups; or a gate and an up in turn, if they are `interleaved`; or
    # its ups alone, if they are not `gated`.
    gate_up: ExpertLinear
    down: ExpertLinear
    activation: str  # one of ACTIVATIONS
    interleaved: bool = False
    gated: bool = True

    @property
    def size(self) -> int:
        """Return the number of inputs of an expert's `down`."""
        return self.gate_up.num_outputs // (2 if self.gated else 1)


def route(logits: torch.Tensor, choice: ExpertChoice) -> Routing:
    """Choose each token's experts: those with the largest of `logits` [T, E].

    With a bias or with groups, those with the largest score, which is the sigmoid, or the part of
    the softmax, plus the bias. Of equal ones, the expert with the lower number comes first. All is
    computed in float32.
    """
    logits = logits.float()
    if choice.sigmoid:
        parts = 1.0 / (1.0 + (-logits).exp())
        total = torch.ones_like(parts[:, :1])
    else:
        largest = logits.max(-1, keepdim=True).values
        parts = ((logits - largest) * choice.logit_factor).exp()
        total = parts.sum(-1, keepdim=True)
    scores = logits
    if choice.sigmoid or choice.bias is not None or choice.groups is not None:
        scores = parts / total
    if choice.bias is not None:
        scores = scores + choice.bias
    if choice.groups is not None:
        scores = kept(scores, choice.groups)
    ids = _largest(scores, choice.top_k)
    weights = parts.gather(1, ids)
    if choice.renormalize:
        total = weights.sum(-1, keepdim=True) + choice.epsilon * total
    weights = weights / total * choice.factor
    if choice.scales is not None:
        weights = weights * choice.scales.float()[ids]
    return Routing(ids.int(), weights)


def kept(scores: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Return `scores` [T, E] with -inf for the experts of the groups that are not kept."""
    by_group = scores.view(len(scores), groups.number, -1)
    group_scores = by_group.topk(groups.best, dim=-1).values.sum(-1)
    is_kept = torch.zeros_like(group_scores, dtype=torch.bool)
    is_kept.scatter_(1, _largest(group_scores, groups.kept), True)
    return by_group.masked_fill(~is_kept[:, :, None], -torch.inf).flatten(1)


def _largest(scores: torch.Tensor, count: int) -> torch.Tensor:
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def gated(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return activation(gate) * up, or `swiglu_oai`, in float32 and rounded once.

    Args:
        gate, up: [T, n].
        activation: one of ACTIVATIONS.
    """
    if activation == "swiglu_oai":
        return swiglu_oai(gate, up)
    return (activate(gate.float(), activation) * up.float()).to(gate.dtype)


def experts(x: torch.Tensor, routing: Routing, mlp: ExpertMLP) -> torch.Tensor:
    """Return the weighted sum of the outputs of each token's experts: [T, n].

    It is summed in the order of the experts' numbers, in float32, and rounded once. Only the
    weights of chosen experts are read.

    Args:
        x: [T, hidden_size].
    """
    total = torch.zeros(len(x), mlp.down.num_outputs, dtype=torch.float32, device=x.device)
    for expert in sorted(set(routing.ids.flatten().tolist())):
        tokens, ranks = (routing.ids == expert).nonzero(as_tuple=True)
        gate_up = F.linear(x[tokens], *mlp.gate_up.of(expert, x.device))
        out = F.linear(_hidden(gate_up, mlp), *mlp.down.of(expert, x.device))
        total[tokens] += routing.weights[tokens, ranks, None] * out.float()
    return total.to(x.dtype)


def _hidden(gate_up: torch.Tensor, mlp: ExpertMLP) -> torch.Tensor:
    """Return what `mlp.down` reads: [T, n]."""
    if not mlp.gated:
        return activate(gate_up.float(), mlp.activation).to(gate_up.dtype)
    if mlp.interleaved:
        return gated(gate_up[:, ::2], gate_up[:, 1::2], mlp.activation)
    gate, up = gate_up.chunk(2, dim=-1)
    return gated(gate, up, mlp.activation)
