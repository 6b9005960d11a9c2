"""Checkpoints that NVIDIA's ModelOpt writes: which linear has which algorithm.

`quantization_config` has the settings, or hf_quant_config.json in older uploads, whose settings lie
in "quantization" and have other names. Inputs are never rounded by the scales of a file.
"""

from typing import Any

from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.formats.fp4 import MODELOPT_NVFP4, Fp4Layout, StoredFp4
from nanovllm.formats.fp8_config import Fp8Config
from nanovllm.formats.names import listed
from nanovllm.formats.stored_fp8 import StoredFp8
from nanovllm.formats.wildcards import ModuleList, plain
from nanovllm.layers.extensions import StoredWeight
from nanovllm.layers.linear import Matrix
from nanovllm.options.validation import shown

_ALGORITHMS: dict[str, Fp8Config | Fp4Layout] = {
    "FP8": Fp8Config("weight_scale", None, None),
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8Config("weight_scale", 1, None, flat=True),
    "NVFP4": MODELOPT_NVFP4,
    "W4A16_NVFP4": MODELOPT_NVFP4,
}
"""How linears are stored, by `quant_algo`."""
_MIXED = "MIXED_PRECISION"
_MAX_LINEARS = 2**17


class ModelOpt:
    """The format of a checkpoint of ModelOpt.

    Args:
        config: `quantization_config`.

    Raises:
        UnsupportedModelError: a setting is not implemented.
        CheckpointError: a field has the wrong type.
    """

    name = "ModelOpt"

    def __init__(self, config: dict[str, Any]) -> None:
        settings, excluded = config, "ignore"
        if "quantization" in config:
            settings, excluded = config["quantization"], "exclude_modules"
            if not isinstance(settings, dict):
                raise CheckpointError(
                    f"quantization_config: quantization must be an object, is {shown(settings)}"
                )
        if excluded not in settings:
            excluded = "exclude_modules"
        self._excluded = ModuleList(settings, excluded)
        algorithm = _upper(settings.get("quant_algo"))
        self._algorithm = None if algorithm == _MIXED else _known(settings, "quant_algo")
        self._linears = _by_linear(settings) if algorithm == _MIXED else {}

    def stored(self, matrix: Matrix, names: list[str]) -> StoredWeight | None:
        """Return how the checkpoint stores the linears `names`, which `matrix` merges.

        Raises:
            UnsupportedModelError: not all of them are stored in the same way.
            ConfigError: this rank's part begins or ends inside a group of numbers.
        """
        algorithms = [self.algorithm(name) for name in names]
        if len(set(algorithms)) > 1:
            found = " and ".join(dict.fromkeys(each or "plain numbers" for each in algorithms))
            raise UnsupportedModelError(
                f"{listed(names)} are computed as one, so all must be stored in one way, not as "
                f"{found}"
            )
        if algorithms[0] is None:
            return None
        layout = _ALGORITHMS[algorithms[0]]
        if isinstance(layout, Fp8Config):
            return StoredFp8(layout, matrix)
        return StoredFp4(layout, matrix)

    def algorithm(self, name: str) -> str | None:
        """Return how linear `name` is stored, one of _ALGORITHMS; None: as plain numbers."""
        if self._excluded.covers(name):
            return None
        if self._algorithm is not None:
            return self._algorithm
        parts = plain(name).split(".")
        paths = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        return next((self._linears[path] for path in paths if path in self._linears), None)


def _upper(value: Any) -> Any:
    return value.upper() if isinstance(value, str) else value


def _known(settings: dict[str, Any], where: str) -> str:
    """Return the algorithm that `settings` name, after a check of its group size."""
    algorithm = _upper(settings.get("quant_algo"))
    if not isinstance(algorithm, str) or algorithm not in _ALGORITHMS:
        raise UnsupportedModelError(
            f"quantization_config: {where} {shown(settings.get('quant_algo'))} is not supported "
            f"(only {', '.join(_ALGORITHMS)} and {_MIXED})"
        )
    group_size = settings.get("group_size")
    if "NVFP4" in algorithm and group_size not in (None, MODELOPT_NVFP4.group_size):
        raise UnsupportedModelError(
            f"quantization_config: {where} {algorithm}: group_size {shown(group_size)} is not "
            f"supported (only {MODELOPT_NVFP4.group_size})"
        )
    return algorithm


def _by_linear(settings: dict[str, Any]) -> dict[str, str]:
    """Return the algorithm of each module of `quantized_layers`, which covers what is in it."""
    layers = settings.get("quantized_layers")
    if not isinstance(layers, dict) or not layers or len(layers) > _MAX_LINEARS:
        raise CheckpointError(
            f"quantization_config: {_MIXED} needs quantized_layers, an object of 1 to "
            f"{_MAX_LINEARS} linears, is {shown(layers)}"
        )
    found = {}
    for name, own in layers.items():
        if not isinstance(own, dict):
            raise CheckpointError(
                f"quantization_config: quantized_layers {shown(name)} must be an object, is "
                f"{shown(own)}"
            )
        found[plain(name)] = _known(own, f"quantized_layers {shown(name)}: quant_algo")
    return found
