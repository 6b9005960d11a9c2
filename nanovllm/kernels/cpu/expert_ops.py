"""The C kernels for a mixture of experts as functions of tensors.

Shapes and layouts are not checked, except in `supports`: a wrong one corrupts memory.
"""

import torch

from nanovllm.kernels.cpu import library
from nanovllm.kernels.cpu.build import PANEL
from nanovllm.kernels.cpu.packed import Panels, PanelWeight
from nanovllm.kernels.torch_experts import ACTIVATIONS, Choice, ExpertLinear, ExpertMLP, Routing


def supports(x: torch.Tensor, mlp: ExpertMLP) -> bool:
    """Return whether `experts` can compute `mlp` for `x`: each expert must have whole panels, and
    its inputs their own order.
    """
    return x.dtype == torch.bfloat16 and all(
        isinstance(linear.weight, PanelWeight)
        and linear.num_outputs % divisor == 0
        and linear.weight.panels.inputs is None
        for linear, divisor in ((mlp.gate_up, 2 * PANEL), (mlp.down, PANEL))
    )


def route(logits: torch.Tensor, choice: Choice) -> Routing:
    """Do what `torch_experts.route` says, for bfloat16 logits [T, E] and scales [E]."""
    (tokens, num_experts), top_k = logits.shape, choice.top_k
    ids = torch.empty(tokens, top_k, dtype=torch.int32)
    weights = torch.empty(tokens, top_k, dtype=torch.float32)
    inputs, sizes = (logits.contiguous(), choice.scales, choice.bias), (tokens, num_experts, top_k)
    options = choice.renormalize, choice.factor, choice.sigmoid
    library.call("nv_route", *inputs, ids, weights, *sizes, *options)
    return Routing(ids, weights)


def experts(x: torch.Tensor, routing: Routing, mlp: ExpertMLP) -> torch.Tensor:
    """Do what `torch_experts.experts` says, for what `supports` accepts.

    A token's result is the same, bit for bit, whatever the other tokens are.
    """
    x = x.contiguous()
    tokens, hidden_size = x.shape
    top_k, size = routing.ids.shape[1], mlp.gate_up.num_outputs // 2
    gate_up, down = _panels(mlp.gate_up), _panels(mlp.down)
    num_experts = len(gate_up.packed) * PANEL // mlp.gate_up.num_outputs
    sizes = tokens, num_experts, top_k
    hidden = torch.empty(tokens * top_k, size, dtype=torch.bfloat16)
    tensors = gate_up.packed, gate_up.scales, gate_up.factors, mlp.gate_up.bias
    of_weight = size, hidden_size, *gate_up.arguments(hidden_size)
    options = ACTIVATIONS.index(mlp.activation), mlp.interleaved
    inputs = x, routing.ids
    library.call("nv_expert_gate_up", *inputs, *tensors, hidden, *sizes, *of_weight, *options)
    prepared = torch.empty(tokens * top_k, 4 * size + 256, dtype=torch.uint8)
    y = torch.empty(tokens, mlp.down.num_outputs, dtype=torch.bfloat16)
    tensors = down.packed, down.scales, down.factors, mlp.down.bias
    of_weight = mlp.down.num_outputs, size, *down.arguments(size)
    routed = hidden, routing.ids, routing.weights
    library.call("nv_expert_down", *routed, *tensors, prepared, y, *sizes, *of_weight)
    return y


def _panels(linear: ExpertLinear) -> Panels:
    assert isinstance(linear.weight, PanelWeight)
    return linear.weight.panels
