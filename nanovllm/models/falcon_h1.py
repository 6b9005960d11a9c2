"""The Falcon-H1 family: attention and Mamba-2 side by side, and factors on most of its parts."""

from typing import ClassVar

import torch
from torch import nn

from nanovllm.attention.batch import Batch
from nanovllm.attention.spec import AttentionOptions
from nanovllm.errors import CheckpointError
from nanovllm.kernels.torch_kernels import TORCH, Kernels
from nanovllm.layers.mamba2 import Mamba2
from nanovllm.models.decoder import DecoderLayer, GatedMLP, SelfAttention
from nanovllm.models.hybrid_parts import mamba_mixer
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.parts import MultipliedForCausalLM, Multipliers, attention_biases
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

    def forward(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Write KV and states; return [O, hidden_size] for `hidden` [T, hidden_size], which may be
        overwritten.
        """
        kernels = self.kernels
        attention_in, attention_out, mamba_in, mamba_out = self._factors
        copy = hidden if mamba_in == 1.0 else kernels.join_columns([hidden])
        mixed = self.mamba(_scaled(kernels, copy, mamba_in), batch)
        hidden = _scaled(kernels, hidden, attention_in)
        heads = self.attention(hidden, batch)
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


class FalconH1ForCausalLM(MultipliedForCausalLM):
    """Falcon-H1 0.5B to 34B: attention and Mamba-2, which keeps a state, side by side, and factors
    on what most parts read or return.
    """

    names: ClassVar[dict[str, str]] = {
        "self_attn.attention.": "self_attn.",
        "self_attn.mamba.": "mamba.",
        "post_attention_layernorm.": "pre_ff_layernorm.",
        "mlp.": "feed_forward.",
        "model.norm.": "model.final_layernorm.",
    }
    reads = frozenset({"embedding_multiplier"})

    def read_multipliers(self, config: ModelConfig) -> Multipliers:
        embedding, logits = (
            config.number(f"{name}_multiplier", 1.0) for name in ("embedding", "lm_head")
        )
        return Multipliers(embedding, 1.0, 1.0 / logits)

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        scale = config.number("key_multiplier", 1.0) * config.head_dim**-0.5
        attention = SelfAttention(
            config,
            self.rotary_emb(config.rope, config.head_dim),
            options=AttentionOptions(scale=scale),
            **attention_biases(config),
        )
        expanded = config.size("mamba_expand") * config.hidden_size
        mamba = mamba_mixer(
            config,
            config.count("mamba_d_ssm") or expanded,
            eps=config.rms_norm_eps if config.flag("mamba_rms_norm") else None,
            gate_first=not config.flag("mamba_norm_before_gate", default=True),
            output_bias=config.flag("projectors_bias"),
            factors=factors(config, "ssm_multipliers", 5),
        )
        return DecoderLayer(config, ParallelMixer(config, attention, mamba), ScaledMLP(config))
