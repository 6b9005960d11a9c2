"""Random weights in place of a checkpoint's: `load_format="dummy"`. Knows no module."""

import torch
from torch import nn


def init_dummy_weights(model: nn.Module, seed: int = 0) -> None:
    """Fill `model` with small random weights, norm weights with ones and biases with zeros."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.data.fill_(0.0 if name.endswith("bias") else 1.0)
        elif parameter.itemsize > 1:
            parameter.data.uniform_(-0.035, 0.035, generator=generator)
        else:  # FP8: torch cannot draw such numbers
            values = torch.empty_like(parameter, dtype=torch.float32)
            parameter.data.copy_(values.uniform_(-0.035, 0.035, generator=generator))
