"""Writes checkpoints whose linears are in FP8 or FP4, and what they stand for in float32.

compressed-tensors' own compressors write and read its formats. ModelOpt's are written from their
layout: the same tensors under other names.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file

from tests.checkpoints import copy_checkpoint, read_json, write_json

Tensors = dict[str, torch.Tensor]

FORMATS = {
    "NVFP4": "nvfp4-pack-quantized",
    "NVFP4A16": "nvfp4-pack-quantized",
    "MXFP4": "mxfp4-pack-quantized",
    "MXFP4A16": "mxfp4-pack-quantized",
}
"""The format of a preset scheme, if not "float-quantized"."""


def scheme_of(preset: str, **weights: Any) -> QuantizationScheme:
    """Return the scheme that compressed-tensors calls `preset`, its weights' fields changed."""
    scheme = copy.deepcopy(preset_name_to_scheme(preset, ["Linear"]))
    if weights:
        arguments = {**scheme.weights.model_dump(), **weights}
        scheme.weights = type(scheme.weights)(**arguments)
    scheme.format = FORMATS.get(preset, "float-quantized")
    return scheme


def compress(weight: torch.Tensor, scheme: QuantizationScheme) -> tuple[Tensors, torch.Tensor]:
    """Return the tensors of a linear by their names' ends, and the weight they stand for."""
    arguments = scheme.weights
    state = {"weight": weight}
    if arguments.strategy == "tensor_group":
        low, high = weight.aminmax()
        state["weight_global_scale"] = generate_gparam(low.reshape(1), high.reshape(1))
    low, high = _ranges(weight, arguments)
    scale, _ = calculate_qparams(low, high, arguments, state.get("weight_global_scale"))
    state["weight_scale"] = scale
    stored = compressor_of(scheme).compress(state, scheme)
    if scheme.format == "float-quantized":
        stored["weight_scale"] = stored["weight_scale"].bfloat16()
    return stored, decompress(stored, scheme)


def decompress(stored: Tensors, scheme: QuantizationScheme) -> torch.Tensor:
    """Return the weight of a linear's tensors in float32.

    For FP4, the package's `decompress` rounds to bfloat16: its parts are called in float32.
    """
    scale, compressor = stored["weight_scale"], compressor_of(scheme)
    if "weight_packed" not in stored:
        return compressor.decompress({**stored, "weight_scale": scale.float()}, scheme)["weight"]
    n, half = stored["weight_packed"].shape
    numbers = unpack_fp4_from_uint8(stored["weight_packed"], n, 2 * half, torch.float32)
    return dequantize(
        numbers,
        compressor._decompress_scale(scale, torch.float32),
        args=scheme.weights,
        global_scale=stored.get("weight_global_scale"),
        dtype=torch.float32,
    )


def compressor_of(scheme: QuantizationScheme) -> Any:
    return BaseCompressor.get_value_from_registry(scheme.format)


def _ranges(weight: torch.Tensor, arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least and the largest number of each part that has a scale."""
    n, k = weight.shape
    if arguments.strategy == "tensor":
        low, high = weight.aminmax()
        return low.reshape(1), high.reshape(1)
    if arguments.strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    rows, columns = (1, arguments.group_size)
    if arguments.strategy == "block":
        rows, columns = arguments.block_structure
    padded = torch.nn.functional.pad(weight, (0, -k % columns, 0, -n % rows))
    blocks = padded.view(-(-n // rows), rows, -(-k // columns), columns)
    return blocks.amin((1, 3)), blocks.amax((1, 3))


def quantized(
    tensors: Tensors, covers: Callable[[str], bool], scheme: QuantizationScheme
) -> tuple[Tensors, Tensors]:
    """Return a checkpoint's tensors with the linears that `covers` names compressed, and wide."""
    stored, wide = {}, {}
    for name, tensor in tensors.items():
        linear = name.removesuffix(".weight")
        if tensor.ndim != 2 or linear == name or not covers(linear):
            stored[name] = wide[name] = tensor
            continue
        parts, wide[name] = compress(tensor.float(), scheme)
        stored |= {f"{linear}.{end}": part.contiguous() for end, part in parts.items()}
        if scheme.input_activations is not None and scheme.input_activations.dynamic is False:
            stored[f"{linear}.input_scale"] = torch.tensor([0.02])
        if scheme.input_activations is not None and scheme.input_activations.dynamic == "local":
            stored[f"{linear}.input_global_scale"] = torch.tensor([300.0])
    return stored, wide


class Cover(NamedTuple):
    """Which linears of a model are stored in few bits."""

    has: Callable[[str], bool]
    ignore: list[str]
    """The others, as compressed-tensors lists them."""
    excluded: list[str]
    """The same for ModelOpt."""


PROJECTIONS = Cover(
    lambda linear: linear.endswith("_proj") and "layers.2.mlp" not in linear,
    ["lm_head", "re:.*layers.2.mlp.*"],
    ["lm_head", "model.layers.2.mlp*"],
)
"""All linears of the decoder layers but the third one's MLP."""


def save_pair(
    model: str, path: Path, stored: Tensors, wide: Tensors, config: dict[str, Any]
) -> tuple[str, str]:
    """Save both checkpoints, the first with `config` as its quantization_config."""
    first = copy_checkpoint(model, path / "stored", quantization_config=config)
    save_file(stored, path / "stored" / "model.safetensors")
    second = copy_checkpoint(model, path / "wide")
    save_file(wide, path / "wide" / "model.safetensors")
    return first, second


def compressed_config(scheme: QuantizationScheme, cover: Cover) -> dict[str, Any]:
    """Return the quantization_config that compressed-tensors writes."""
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        ignore=cover.ignore,
        format=scheme.format,
        quantization_status="compressed",
    )
    return config.model_dump(mode="json")


def make_compressed(
    model: str, path: Path, scheme: QuantizationScheme, cover: Cover = PROJECTIONS
) -> tuple[str, str]:
    """Convert a float32 checkpoint as compressed-tensors does.

    Returns:
        The checkpoint, and a float32 checkpoint of what its decompressor returns.
    """
    tensors = load_file(Path(model) / "model.safetensors")
    stored, wide = quantized(split_experts(tensors), cover.has, scheme)
    wide = joined_experts(wide, tensors)
    return save_pair(model, path, stored, wide, compressed_config(scheme, cover))


def modelopt_tensors(stored: Tensors, *, per_channel: bool = False) -> Tensors:
    """Rename compressed-tensors' tensors to ModelOpt's, and turn global scales around."""
    renamed: Tensors = {}
    for name, tensor in stored.items():
        linear, _, end = name.rpartition(".")
        if end == "weight_packed":
            renamed[f"{linear}.weight"] = tensor
        elif end == "weight_global_scale":
            renamed[f"{linear}.weight_scale_2"] = (1 / tensor).reshape(())
        elif end == "input_global_scale":
            renamed[f"{linear}.input_scale"] = (1 / tensor).reshape(())
        elif end == "weight_scale" and tensor.dtype == torch.bfloat16:
            renamed[name] = tensor.float().reshape(-1 if per_channel else ())
        else:
            renamed[name] = tensor
    return renamed


MODELOPT_PRESETS = {
    "NVFP4": "NVFP4",
    "W4A16_NVFP4": "NVFP4A16",
    "FP8": "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN": "FP8_DYNAMIC",
}
"""The scheme of compressed-tensors that stores the same numbers, by ModelOpt's algorithm."""


def make_modelopt(
    model: str,
    path: Path,
    algorithm: str,
    cover: Cover = PROJECTIONS,
    *,
    in_old_file: bool = False,
    **settings: Any,
) -> tuple[str, str]:
    """Convert a float32 checkpoint as ModelOpt does; see `make_compressed`.

    Args:
        in_old_file: the settings are in hf_quant_config.json instead of config.json.
    """
    scheme = scheme_of(MODELOPT_PRESETS[algorithm])
    tensors = load_file(Path(model) / "model.safetensors")
    stored, wide = quantized(split_experts(tensors), cover.has, scheme)
    wide = joined_experts(wide, tensors)
    stored = modelopt_tensors(stored, per_channel=algorithm == "FP8_PER_CHANNEL_PER_TOKEN")
    producer = {"name": "modelopt", "version": "0.39.0"}
    config = {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "ignore": cover.excluded,
        "producer": producer,
        **settings,
    }
    pair = save_pair(model, path, stored, wide, config)
    if in_old_file:
        file = path / "stored" / "config.json"
        write_json(file, {k: v for k, v in read_json(file).items() if k != "quantization_config"})
        details = {
            "quant_algo": algorithm,
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": cover.excluded,
            **settings,
        }
        content = {"producer": producer, "quantization": details}
        write_json(path / "stored" / "hf_quant_config.json", content)
    return pair


def split_experts(tensors: Tensors) -> Tensors:
    """Return the tensors of a checkpoint with linears of each expert in place of those of all."""
    split: Tensors = {}
    for name, tensor in tensors.items():
        layer, _, end = name.partition(".experts.")
        for i in range(len(tensor) if tensor.ndim == 3 and end else 0):
            linear = f"{layer}.experts.{i}"
            if end == "gate_up_proj":
                gate, up = tensor[i].chunk(2)
                split[f"{linear}.gate_proj.weight"] = gate.contiguous()
                split[f"{linear}.up_proj.weight"] = up.contiguous()
            else:
                split[f"{linear}.down_proj.weight"] = tensor[i].contiguous()
        if not (tensor.ndim == 3 and end):
            split[name] = tensor
    return split


def joined_experts(tensors: Tensors, like: Tensors) -> Tensors:
    """Undo `split_experts` for a checkpoint whose tensors were `like`."""
    joined: Tensors = {}
    for name, tensor in like.items():
        layer, _, end = name.partition(".experts.")
        if not end or tensor.ndim != 3:
            joined[name] = tensors[name]
            continue
        parts = ("gate_proj", "up_proj") if end == "gate_up_proj" else ("down_proj",)
        joined[name] = torch.stack(
            [
                torch.cat([tensors[f"{layer}.experts.{i}.{part}.weight"] for part in parts])
                for i in range(len(tensor))
            ]
        )
    return joined
