"""Writes the new values of a weight over the old ones, in the form that the layer has.

Pointers to it, such as those of recorded steps and CUDA graphs, stay valid.
"""

import torch
from torch import nn

from nanovllm.errors import UnsupportedModelError
from nanovllm.features.training.memory import tensors_of
from nanovllm.features.training.targets import Weight
from nanovllm.kernels.cpu.packed import OneDnnWeight
from nanovllm.kernels.torch_kernels import LinearMethod
from nanovllm.layers.linear import base_method
from nanovllm.loading.shards import Shard
from nanovllm.worker.model_loader import pack
from nanovllm.worker.network import Network


def write(weight: Weight, values: torch.Tensor, network: Network) -> None:
    """Give a weight new `values`, in its first form: rounded and packed as when it was loaded.

    Raises:
        UnsupportedModelError: the layer's form cannot be changed in place.
    """
    if weight.parameter is not None:
        weight.parameter.data.copy_(values)
        return
    method = base_method(weight.matrices[0])
    assert method is not None, "a matrix without a parameter has one"
    if isinstance(method, OneDnnWeight):
        method.replace(values)
    elif weight.matrices[0].quantized is not None:
        _overwrite(weight.name, method, _rounded(weight, values, network))
    else:
        packed = pack(values, weight.matrices, network.kernels)
        _overwrite(weight.name, method, packed or values)


def _rounded(weight: Weight, values: torch.Tensor, network: Network) -> LinearMethod:
    from nanovllm.features.quantization.rounding import Rounding

    assert network.config.quantization is not None
    assert weight.twin is not None
    # The format asks a matrix for the shape, dtype and device of its weight, not for numbers.
    like = torch.empty(1, dtype=values.dtype, device=values.device).expand(values.shape)
    before = weight.twin.weight
    weight.twin.weight = nn.Parameter(like, requires_grad=False)
    stored = Rounding(network.config.quantization, network.kernels).quantized(weight.twin, [])
    weight.twin.weight = before
    assert stored is not None
    whole = Shard(weight.name, tuple(values.shape), torch.empty_like(values, device="meta"))
    for shard in stored.shards(whole):
        stored.store(shard.target, values)
    return stored.method(values.dtype, network.kernels)


def _overwrite(name: str, old: LinearMethod, new: LinearMethod | torch.Tensor) -> None:
    """Copy what `new` holds, or the tensor that it is, to the memory of `old`."""
    targets = list(tensors_of(old))
    sources = list(tensors_of(new))
    fits = type(old) is type(new) or isinstance(new, torch.Tensor)
    fits &= len(targets) == len(sources)
    for target, source in zip(targets, sources, strict=False):
        fits &= target.shape == source.shape and target.dtype == source.dtype
    if not fits:
        raise UnsupportedModelError(
            f"update_weights: {name} is kept as {type(old).__name__}, which cannot be changed"
        )
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def is_exact(weight: Weight) -> bool:
    """Return whether the loaded form has all bits of the weight, so that parts of it can stay."""
    return not weight.matrices or weight.matrices[0].quantized is None


def old_values(weight: Weight, network: Network) -> torch.Tensor:
    """Return the values that an exact weight has now, in its first form."""
    if not weight.matrices:
        assert weight.parameter is not None
        return weight.parameter.data
    rows = torch.arange(weight.shape[0], device=network.device)
    return weight.matrices[0].embedding(rows).contiguous()
