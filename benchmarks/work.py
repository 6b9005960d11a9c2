"""The bytes and operations that a part of a network cannot do without."""

from typing import Any

import torch

from nanovllm.attention.spec import ROUNDED_KV
from nanovllm.kernels.cpu.packed import W8A8, PanelWeight
from nanovllm.layers.attention import Attention
from nanovllm.layers.linear import WeightModule

_LEAST_BITS = {32: 24.0, 16: 12.0, 8: 6.5, 4: 0.0}
"""By the bits of a number: those that it has at least with its share of a scale."""


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors held by an object of one of our classes, or by a list of them."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    own = type(value).__module__.startswith("nanovllm") and hasattr(value, "__dict__")
    return tensors_in(list(vars(value).values())) if own else []


def weight_tensors(module: WeightModule) -> list[torch.Tensor]:
    """Return what a loaded matrix multiplies with."""
    return [module.weight.data] if module.weight is not None else tensors_in(module.method)


def weight_bits(module: WeightModule, numbers: int) -> int:
    """Return the bits of a loaded matrix of so many numbers, as `Rates.multiplying` takes them."""
    if isinstance(module.method, PanelWeight) and module.method.panels.kind == W8A8:
        return 4  # inputs have 8 bits, as beside weights of 4
    ratio = 8 * sum(tensor.nbytes for tensor in weight_tensors(module)) / numbers
    return next(bits for bits, least in _LEAST_BITS.items() if ratio >= least)


def attention_bits(layer: Attention) -> int:
    """Return the bits of the numbers that attention multiplies, as `weight_bits` does."""
    if layer.kv_cache.dtype in ROUNDED_KV:
        return 4  # queries have 8 bits, as inputs beside weights of 4
    return 32 if layer.kv_cache.itemsize == 4 else 16


def attention_work(layer: Attention, first: int, end: int) -> tuple[int, int]:
    """Return the bytes of keys and values, and the operations, of a row's attention.

    Args:
        first, end: positions of the row's first token, and of the one after its last.
    """
    num_heads, num_kv_heads, head_dim = layer.sizes
    window, values = layer.options.window, layer.options.value_dim
    longest = end if window is None else min(window, end)
    # The token at position p sees p + 1 keys, or a window of them.
    growing = range(first + 1, min(end, longest) + 1)
    pairs = sum(growing) + longest * (end - first - len(growing))
    before = first if window is None else min(window - 1, first)
    quantized = layer.kv_cache.dtype in ROUNDED_KV
    row = layer.kv_cache.shape[-1] if quantized else head_dim  # with its scales
    nbytes = (before + (end - first)) * num_kv_heads * row * (1 if values else 2)
    nbytes *= layer.kv_cache.itemsize
    return nbytes, 2 * num_heads * (head_dim + (values or head_dim)) * pairs
