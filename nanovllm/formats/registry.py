"""The formats of weights: by what a checkpoint says of itself, and by what the user asks for."""

from typing import Any

import torch
from torch import nn

from nanovllm.errors import CheckpointError, ConfigError, UnsupportedModelError
from nanovllm.formats.fp8 import Fp8Weight, expect_fp8, quantize_fp8
from nanovllm.formats.fp8_config import Fp8Config
from nanovllm.formats.integer import choose_group_size, make_int_method, quantize
from nanovllm.formats.mxfp4 import MXFP4, expect_mxfp4
from nanovllm.kernels.torch_kernels import Kernels, WeightMethod
from nanovllm.layers.experts import StackedLinear
from nanovllm.layers.linear import LinearBase
from nanovllm.options.config import Config
from nanovllm.options.validation import shown

_FORMATS = {
    "fp8": Fp8Config.from_blocks,
    "compressed-tensors": Fp8Config.from_channels,
}
"""By `quant_method` of config.json: what reads the other settings."""


def checkpoint_format(config: Any) -> Fp8Config | None:
    """Read `quantization_config` of config.json; None: the weights are plain numbers.

    Raises:
        UnsupportedModelError: a setting is not implemented.
        CheckpointError: a field has the wrong type.
    """
    if config is None:
        return None
    if not isinstance(config, dict):
        raise CheckpointError(
            f"config.json: quantization_config must be an object, is {shown(config)}"
        )
    method = config.get("quant_method")
    if method == MXFP4:
        return None  # of experts alone: linears are plain numbers
    if not isinstance(method, str) or method not in _FORMATS:
        raise UnsupportedModelError(
            f"quantization_config quant_method {shown(method)} is not supported (only "
            f"{', '.join(_FORMATS)} and {MXFP4})"
        )
    return _FORMATS[method](config)


def check_quantization(stored: Any, config: Config) -> None:
    """Check `stored`, the quantization_config of config.json, and what the user asks for.

    Raises:
        UnsupportedModelError, CheckpointError: as for `checkpoint_format`.
        ConfigError: the weights are quantised already, in another way.
    """
    checkpoint_format(stored)
    if config.quantization not in (None, "fp8"):
        raise ConfigError(
            f"quantization {config.quantization!r}: {config.model} is in FP8 already; leave it out"
        )


def expect_format(model: nn.Module, config: Any) -> None:
    """Prepare the linears of `model` to load what `quantization_config` says.

    Raises:
        ConfigError, UnsupportedModelError, CheckpointError: as for `checkpoint_format` and
            `expect_fp8`.
    """
    fp8 = checkpoint_format(config)
    if config is not None and config["quant_method"] == MXFP4:
        for module in model.modules():
            if isinstance(module, StackedLinear):
                expect_mxfp4(module)
    if fp8 is not None:
        for prefix, module in model.named_modules():
            if isinstance(module, LinearBase):
                expect_fp8(module, prefix, fp8)


def round_weight(weight: torch.Tensor, quantization: str, kernels: Kernels) -> WeightMethod:
    """Return the method for `weight` [n, k], rounded.

    Args:
        quantization: "int8", "int4" or "fp8".

    Raises:
        ConfigError: no group size of `quantization` divides k.
    """
    if quantization == "fp8":
        values, scales = quantize_fp8(weight)
        return Fp8Weight(values, scales, weight.shape[1], weight.dtype, kernels)
    bits = int(quantization.removeprefix("int"))
    rounded = quantize(weight, bits, choose_group_size(quantization, weight.shape[1]))
    return make_int_method(rounded, weight.dtype, kernels)
