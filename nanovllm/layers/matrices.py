"""The matrices of a model, those that share a weight together, and what multiplies with them. Knows
no model.
"""

from typing import Protocol, runtime_checkable

from torch import nn

from nanovllm.kernels.torch_kernels import WeightMethod
from nanovllm.layers.linear import Matrix


@runtime_checkable
class WrappingMethod(Protocol):
    """A `WeightMethod` that changes what another computes, as adapters do."""

    base: WeightMethod


def own_method(matrix: Matrix) -> WeightMethod | None:
    """Return what multiplies with the weight of `matrix` itself, see `Matrix.method`."""
    method = matrix.method
    return method.base if isinstance(method, WrappingMethod) else method


def shared_matrices(model: nn.Module) -> dict[nn.Parameter, dict[str, Matrix]]:
    """Return the matrices that have a weight, by weight and then by path: tied ones have the same
    weight.
    """
    sharing: dict[nn.Parameter, dict[str, Matrix]] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, Matrix) and module.weight is not None:
            sharing.setdefault(module.weight, {})[prefix] = module
    return sharing
