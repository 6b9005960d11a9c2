"""The matrices of a model, those that share a weight together, and what multiplies with them. Knows
no model.
"""

from torch import nn

from nanovllm.kernels.torch_kernels import WeightMethod
from nanovllm.layers.linear import Matrix


def own_method(matrix: Matrix) -> WeightMethod | None:
    """Return what multiplies with the weight of `matrix` itself, not what wraps it for adapters."""
    method: WeightMethod | None = getattr(matrix.method, "base", matrix.method)
    return method


def shared_matrices(model: nn.Module) -> dict[nn.Parameter, dict[str, Matrix]]:
    """Return the matrices that have a weight, by weight and then by path: tied ones have the same
    weight.
    """
    sharing: dict[nn.Parameter, dict[str, Matrix]] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, Matrix) and module.weight is not None:
            sharing.setdefault(module.weight, {})[prefix] = module
    return sharing
