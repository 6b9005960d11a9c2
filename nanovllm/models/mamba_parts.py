"""Parts of families with Mamba-2 layers, built from a config.json."""

import math
from typing import Any, NamedTuple

from nanovllm.errors import CheckpointError
from nanovllm.layers.mamba2 import Mamba2, MambaSizes
from nanovllm.models.hybrid_parts import MAX_TAPS
from nanovllm.models.model_config import ModelConfig
from nanovllm.options.validation import check_float, check_int, shown

MAMBA_NAMES = {
    f"self_attn.{part}": f"mamba.{part}"
    for part in ("in_proj.", "conv1d.", "A_log", "D", "dt_bias", "norm.", "out_proj.")
}
"""Checkpoint names for the modules of a `Mamba2` in a `DecoderLayer`."""
_MAX_DIM = 2**10
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
