"""Parts of Falcon-H1, with factors on what they read or return."""

import torch
from torch import nn

from nanovllm.attention.batch import Batch
from nanovllm.errors import CheckpointError
from nanovllm.kernels.torch_kernels import TORCH, Kernels
from nanovllm.layers.mamba2 import Mamba2
from nanovllm.models.decoder import GatedMLP, SelfAttention
from nanovllm.models.model_config import ModelConfig
from nanovllm.options.validation import check_float, shown


class ParallelMixer(nn.Module):
    """Attention and Mamba-2 of the same input. Each has a factor on it, and one on its output."""

    kernels: Kernels = TORCH

    def __init__(self, config: ModelConfig, attention: SelfAttention, mamba: Mamba2) -> None:
        super().__init__()
        self.attention = attention
        self.mamba = mamba
        names = ("attention_in", "attention_out", "ssm_in", "ssm_out")
        self._factors = [config.number(f"{name}_multiplier", 1.0) for name in names]

    def forward(
        self, hidden: torch.Tensor, batch: Batch, output_indices: torch.Tensor | None
    ) -> torch.Tensor:
        """Write KV and states; return [O, hidden_size] for `hidden` [T, hidden_size], which may be
        overwritten.
        """
        kernels = self.kernels
        attention_in, attention_out, mamba_in, mamba_out = self._factors
        copy = hidden if mamba_in == 1.0 else kernels.join_columns([hidden])
        mixed = self.mamba(_scaled(kernels, copy, mamba_in), batch, output_indices)
        hidden = _scaled(kernels, hidden, attention_in)
        heads = self.attention(hidden, batch, output_indices)
        total = _scaled(kernels, mixed, mamba_out)
        kernels.add(_scaled(kernels, heads, attention_out), total)
        return total


class ScaledMLP(GatedMLP):
    """A gated linear unit with a factor on what is activated, and one on the output."""

    kernels: Kernels = TORCH

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, bias=config.flag("mlp_bias"))
        self._factors = factors(config, "mlp_multipliers", 2)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate_up = self.gate_up_proj(hidden)
        _scaled(self.kernels, gate_up[:, : gate_up.shape[1] // 2], self._factors[0])
        return _scaled(self.kernels, self.down_proj(self.act(gate_up)), self._factors[1])


def factors(config: ModelConfig, key: str, count: int) -> list[float]:
    """Return the numbers of the list `key`; ones if the config has none."""
    values = config.fields.get(key)
    if values is None:
        return [1.0] * count
    if not isinstance(values, list) or len(values) != count:
        raise CheckpointError(
            f"config.json: {key} must be a list of {count} numbers, is {shown(values)}"
        )
    name = f"config.json: a number in {key}"
    return [check_float(CheckpointError, name, value, 1e-30, 1e6) for value in values]


def _scaled(kernels: Kernels, x: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply `x`, whose rows may lie apart, by `factor` in place, and return it."""
    if factor != 1.0:
        kernels.scale(x, factor)
    return x
