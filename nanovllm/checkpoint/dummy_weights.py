"""Random weights in place of a checkpoint's: `load_format="dummy"`. Knows no module."""

from collections.abc import Iterable

import torch
from torch import nn

from nanovllm.checkpoint.loader import Store
from nanovllm.checkpoint.shards import Shard

_LIMIT = 0.035
"""Of a random weight, either side of 0."""
_SCALE = 2.0**-7
"""Of stored weights whose scale is a tensor."""
_ROWS_AT_ONCE = 1024


def init_dummy_weights(model: nn.Module, seed: int = 0) -> None:
    """Fill `model` with small random weights, norm weights with ones and biases with zeros.

    Parameters on torch's meta device stay as they are.
    """
    parameters = [(name, p) for name, p in model.named_parameters() if not p.is_meta]
    generator = torch.Generator(parameters[0][1].device).manual_seed(seed)
    for name, parameter in parameters:
        if parameter.ndim == 1:
            parameter.data.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            parameter.data.uniform_(-_LIMIT, _LIMIT, generator=generator)


def init_dummy_shards(
    module: nn.Module, shards: Iterable[Shard], store: Store, seed: int = 0
) -> None:
    """Fill the targets of the shards of `module`, whose weight is stored in another form.

    Plain weights and those in FP8 are small and random. Integers are 0, and other numbers are
    small: scales, most likely.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    for shard in shards:
        target = shard.target
        if target.is_meta or (target.itemsize == 1 and target.is_floating_point()):
            for start in range(0, len(target), _ROWS_AT_ONCE):
                rows = target[start : start + _ROWS_AT_ONCE]
                values = torch.empty(rows.shape, dtype=torch.float32)
                values.uniform_(-_LIMIT, _LIMIT, generator=generator)
                if not store(module, rows, values):
                    rows.copy_(values)
        elif target.is_floating_point():
            target.fill_(0.0 if shard.name.endswith(".bias") else _SCALE)
        else:
            target.zero_()
