"""Parts of families that mix layers with full attention and layers with a state."""

import math
from typing import Any, NamedTuple

import torch
from torch import nn

from nanovllm.attention.batch import Batch
from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.kernels.torch_math import NORM_CENTRED
from nanovllm.layers.gated_delta import DeltaSizes, GatedDeltaNet
from nanovllm.layers.linear import LinearBase
from nanovllm.layers.mamba2 import Mamba2, MambaSizes
from nanovllm.layers.pieces import PiecedLinear, TensorRows, head_rows
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.layers.state_layer import ShortConv
from nanovllm.models.decoder import DecoderLayer
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.parts import GatedAttention, attention_biases
from nanovllm.options.validation import check_float, check_int, shown

DELTA_NAMES = {
    f"self_attn.{part}": f"linear_attn.{part}"
    for part in ("in_proj_", "conv1d.", "A_log", "dt_bias", "norm.", "out_proj.")
}
"""Checkpoint names for the modules of a `GatedDeltaNet` in a `DecoderLayer`."""
MAX_TAPS = 64
"""Most tokens of a convolution: like `_MAX_DIM`, above every known model."""
_MAX_DIM = 2**10


class BlockLayer(DecoderLayer):
    """A layer with one part after one norm: a mixer, or an MLP."""

    def __init__(
        self, config: ModelConfig, mixer: nn.Module | None, mlp: nn.Module | None, **norm: Any
    ) -> None:
        super().__init__(config, mixer or nn.Identity(), mlp or nn.Identity(), **norm)
        self._mixes = mixer is not None
        del self.post_attention_layernorm

    def forward(
        self, hidden: torch.Tensor | None, residual: torch.Tensor, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, residual = self.add_input(hidden, residual, batch)
        hidden = self.self_attn(hidden, batch) if self._mixes else batch.outputs(hidden)
        return self.mlp(hidden), batch.outputs(residual)


class HeadGatedAttention(GatedAttention):
    """Gated attention whose checkpoint stores the gate of each head after its query, in q_proj.

    An RMSNorm times (1 + weight) is applied to each query head and each key head.
    """

    def __init__(self, config: ModelConfig, rotary_emb: RotaryEmbedding) -> None:
        if not config.flag("attn_output_gate", default=True):
            raise UnsupportedModelError("config.json: attn_output_gate False is not supported")
        biases = attention_biases(config)
        super().__init__(config, rotary_emb, qk_norm=True, norm_kind=NORM_CENTRED, **biases)
        queries = head_rows("q_proj", config.num_heads, 2 * config.head_dim, 0, config.head_dim)
        slices = self.qkv_proj.slices
        rest = [TensorRows(name, *slices[name]) for name in ("k_proj", "v_proj")]
        self.qkv_proj = PiecedLinear(config.hidden_size, [*queries, *rest], bias=biases["bias"])  # type: ignore[assignment]

    def make_gate(self, config: ModelConfig) -> LinearBase:
        size = config.head_dim
        gates = head_rows("q_proj", config.num_heads, 2 * size, size, size)
        return PiecedLinear(config.hidden_size, gates, bias=self.qkv_proj.bias is not None)


def delta_net(config: ModelConfig, *, grouped: bool = False) -> GatedDeltaNet:
    """Return the gated DeltaNet of a layer. See `GatedDeltaNet`."""
    key_heads, value_heads = (config.size(f"linear_num_{kind}_heads") for kind in ("key", "value"))
    key_dim, value_dim = (
        config.size(f"linear_{kind}_head_dim", high=_MAX_DIM) for kind in ("key", "value")
    )
    if value_heads % key_heads:
        raise CheckpointError(
            f"config.json: linear_num_value_heads {value_heads} is no multiple of "
            f"linear_num_key_heads {key_heads}"
        )
    taps = config.size("linear_conv_kernel_dim", high=MAX_TAPS, low=2)
    sizes = DeltaSizes(config.hidden_size, key_heads, value_heads, key_dim, value_dim, taps)
    return GatedDeltaNet(sizes, config.rms_norm_eps, grouped=grouped)


def short_conv(config: ModelConfig) -> ShortConv:
    """Return the short convolution of a layer. See `ShortConv`."""
    taps = config.size("conv_L_cache", high=MAX_TAPS, low=2)
    return ShortConv(config.hidden_size, taps, bias=config.flag("conv_bias"))


def check_mixed(types: list[str], field: str = "layer_types") -> list[str]:
    """Check and return the `types` of a model's layers.

    Args:
        field: of the config, which says what they are.

    Raises:
        UnsupportedModelError: no layer has full attention.
    """
    if "full_attention" not in types:
        raise UnsupportedModelError(f"config.json: {field} without full_attention is not supported")
    return types


MAMBA_NAMES = {
    f"self_attn.{part}": f"mamba.{part}"
    for part in ("in_proj.", "conv1d.", "A_log", "D", "dt_bias", "norm.", "out_proj.")
}
"""Checkpoint names for the modules of a `Mamba2` in a `DecoderLayer`."""
_MAX_HEADS = 2**12


class MambaFields(NamedTuple):
    """The names of a config's fields for the sizes of a Mamba-2 layer, and for its biases."""

    heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    """It may be "auto"."""
    groups: str = "mamba_n_groups"
    state_size: str = "mamba_d_state"
    taps: str = "mamba_d_conv"
    conv_bias: str = "mamba_conv_bias"
    bias: str = "mamba_proj_bias"
    """Of the linears."""


def mamba_mixer(
    config: ModelConfig,
    inner_size: int | None,
    fields: MambaFields = MambaFields(),  # noqa: B008 (immutable)
    **options: Any,
) -> Mamba2:
    """Return the Mamba-2 mixer of a layer.

    Args:
        inner_size: heads times head_dim, if the config says that elsewhere, too.
        options: of `Mamba2`, in place of those in the config.

    Raises:
        CheckpointError: a field is invalid, or sizes do not go together.
    """
    heads = config.size(fields.heads, high=_MAX_HEADS)
    groups = config.size(fields.groups, high=_MAX_HEADS)
    if heads % groups:
        raise CheckpointError(
            f"config.json: {fields.heads} {heads} is no multiple of {fields.groups} {groups}"
        )
    head_dim = config.fields.get(fields.head_dim)
    if head_dim == "auto" and inner_size is not None:
        head_dim = inner_size // heads
    name = f"config.json: {fields.head_dim}"
    head_dim = check_int(CheckpointError, name, head_dim, 1, _MAX_DIM)
    if inner_size not in (None, heads * head_dim):
        raise CheckpointError(
            f"config.json: {fields.heads} {heads} times {fields.head_dim} {head_dim} is not "
            f"{inner_size}, the size between the linears: mamba_d_ssm, or mamba_expand times "
            "hidden_size"
        )
    state_size = config.size(fields.state_size, high=_MAX_DIM)
    taps = config.size(fields.taps, high=MAX_TAPS, low=2)
    bias = config.flag(fields.bias)
    defaults = {
        "eps": config.rms_norm_eps,
        "conv_bias": config.flag(fields.conv_bias),
        "bias": bias,
        "output_bias": bias,
    }
    sizes = MambaSizes(config.hidden_size, heads, head_dim, groups, state_size, taps)
    return Mamba2(sizes, step_limits(config), **{**defaults, **options})


def step_limits(config: ModelConfig) -> tuple[float, float]:
    """Return `time_step_limit`; without it, no limit. transformers writes infinity as an object."""
    limits = config.fields.get("time_step_limit")
    if limits is None:
        return 0.0, math.inf
    if not isinstance(limits, list) or len(limits) != 2:
        raise CheckpointError(
            f"config.json: time_step_limit must be a list of two numbers, is {shown(limits)}"
        )
    infinite = ({"__float__": "Infinity"}, math.inf)
    low, high = limits
    name = "config.json: a number in time_step_limit"
    low = check_float(CheckpointError, name, low, 0.0)
    return low, math.inf if high in infinite else check_float(CheckpointError, name, high, low)
