"""Checkpoints that NVIDIA's ModelOpt writes: which linear has which algorithm.

`quantization_config` has the settings, or hf_quant_config.json in older uploads, whose settings lie
in "quantization" and have other names. Inputs are never rounded by the scales of a file.
"""

from typing import Any

import torch

from nanovllm.errors import CheckpointError
from nanovllm.features.quantization.fp4 import MODELOPT_NVFP4, Fp4Layout, QuantizedFp4
from nanovllm.features.quantization.quantized_fields import Field
from nanovllm.features.quantization.quantized_fp8 import QuantizedFp8
from nanovllm.features.quantization.settings import (
    WHERE,
    ModuleList,
    enclosing,
    one_form,
    plain,
    read_object,
    unsupported,
)
from nanovllm.layers.linear import QuantizedWeight, WeightFormat, WeightModule
from nanovllm.options.validation import shown

_ALGORITHMS: dict[str, Field | Fp4Layout] = {
    "FP8": Field("weight_scale", torch.float32, None, outputs=None),
    "FP8_PER_CHANNEL_PER_TOKEN": Field("weight_scale", torch.float32, None, flat=True),
    "NVFP4": MODELOPT_NVFP4,
    "W4A16_NVFP4": MODELOPT_NVFP4,
}
"""How linears are stored, by `quant_algo`: the scales of FP8, or FP4."""
_MIXED = "MIXED_PRECISION"
_MAX_LINEARS = 2**17


class ModelOpt(WeightFormat):
    """The format of a checkpoint of ModelOpt."""

    name = "ModelOpt"

    def __init__(self, config: dict[str, Any]) -> None:
        settings = config
        excluded = "ignore"
        if "quantization" in config:
            settings = read_object(config["quantization"], f"{WHERE}: quantization")
            excluded = "exclude_modules"
        if excluded not in settings:
            excluded = "exclude_modules"
        self._excluded = ModuleList(settings, excluded)
        algorithm = _upper(settings.get("quant_algo"))
        self._algorithm = None if algorithm == _MIXED else _known(settings, "quant_algo")
        self._linears = _by_linear(settings) if algorithm == _MIXED else {}

    def quantized(self, matrix: WeightModule, names: list[str]) -> QuantizedWeight | None:
        algorithm = one_form(names, list(map(self.algorithm, names)), "the excluded modules")
        if algorithm is None:
            return None
        layout = _ALGORITHMS[algorithm]
        if isinstance(layout, Field):
            return QuantizedFp8(layout, matrix)
        return QuantizedFp4(layout, matrix)

    def algorithm(self, name: str) -> str | None:
        """Return how linear `name` is stored, one of _ALGORITHMS; None: as plain numbers."""
        if self._excluded.contains(name):
            return None
        if self._algorithm is not None:
            return self._algorithm
        paths = enclosing(plain(name))
        return next((self._linears[path] for path in paths if path in self._linears), None)


def _upper(value: Any) -> Any:
    return value.upper() if isinstance(value, str) else value


def _known(settings: dict[str, Any], where: str) -> str:
    """Return the algorithm that `settings` name, after a check of its group size."""
    algorithm = _upper(settings.get("quant_algo"))
    if not isinstance(algorithm, str) or algorithm not in _ALGORITHMS:
        only = f"{', '.join(_ALGORITHMS)} and {_MIXED}"
        raise unsupported(where, settings.get("quant_algo"), only)
    group_size = settings.get("group_size")
    if "NVFP4" in algorithm and group_size not in (None, MODELOPT_NVFP4.group_size):
        only = str(MODELOPT_NVFP4.group_size)
        raise unsupported(f"{where} {algorithm}: group_size", group_size, only)
    return algorithm


def _by_linear(settings: dict[str, Any]) -> dict[str, str]:
    """Return the algorithm of each module of `quantized_layers`, which covers what is in it."""
    where = f"{WHERE}: quantized_layers"
    layers = read_object(settings.get("quantized_layers", {}), where, _MAX_LINEARS)
    if not layers:
        raise CheckpointError(f"{where} has no linear, which {_MIXED} needs")
    found = {}
    for name, own in layers.items():
        path = f"quantized_layers {shown(name)}"
        found[plain(name)] = _known(read_object(own, f"{WHERE}: {path}"), f"{path}: quant_algo")
    return found
