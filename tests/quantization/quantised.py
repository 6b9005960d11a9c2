"""Writes checkpoints of integers in their published layouts, and beside each a plain one.

The plain one has the weights that the format's own package gets out of the first, in float32:
compressed_tensors' `decompress`, after its `AutoAWQConverter` for AWQ. For GPTQ the layout is
written here, after auto-round's torch code. Knows no engine.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file

from tests.checkpoints import copy_checkpoint

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "head_dim": 32,
}
"""Of a model whose linears groups of 128 divide."""
Tensors = dict[str, torch.Tensor]
Written = tuple[Tensors, torch.Tensor]
"""The tensors of a linear by suffix, and the weight [out, in] float32 that they stand for."""


def write(
    model: str,
    path: Path,
    linear: Callable[[str, torch.Tensor], Written | None],
    quantization_config: Mapping[str, Any],
    ends: tuple[str, ...] = ("_proj.weight", "_proj_with_mqa.weight"),
) -> tuple[str, str]:
    """Convert a float32 checkpoint.

    Args:
        linear: gets the name and the weight of a linear; None: it stays as it is.
        ends: of the names of the weights that it gets.

    Returns:
        The converted checkpoint, and a plain one with its weights.
    """
    tensors = load_file(Path(model) / "model.safetensors")
    wide = dict(tensors)
    for name in list(tensors):
        if not name.endswith(ends):
            continue
        written = linear(name.removesuffix(".weight"), tensors[name])
        if written is not None:
            del tensors[name]
            fields, wide[name] = written
            for suffix, tensor in fields.items():
                tensors[f"{name.removesuffix('weight')}{suffix}"] = tensor.contiguous()
    converted = copy_checkpoint(
        model, path / "converted", quantization_config=dict(quantization_config)
    )
    save_file(tensors, path / "converted" / "model.safetensors")
    plain = copy_checkpoint(model, path / "plain")
    save_file(wide, path / "plain" / "model.safetensors")
    return converted, plain


def rounded(
    weight: torch.Tensor, bits: int, group: int, *, symmetric: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales [out, groups] of `dtype` and zero points [out, groups] int8 for `weight`."""
    grouped = weight.view(len(weight), -1, group)
    half = 2 ** (bits - 1)
    if symmetric:
        scales = (grouped.abs().amax(-1) / (half - 0.5)).to(dtype)
        return scales, torch.zeros(scales.shape, dtype=torch.int8)
    low, high = grouped.aminmax(dim=-1)
    low, high = low.clamp(max=0), high.clamp(min=0)
    scales = ((high - low) / (2 * half - 1)).to(dtype)
    zeros = (-low / scales.float()).round() - half
    return scales, zeros.clamp(-half, half - 1).to(torch.int8)


def values_of(
    weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: int, order: torch.Tensor
) -> torch.Tensor:
    """Return the integers [out, in] int8 of `weight`, whose inputs have the groups `order`."""
    half = 2 ** (bits - 1)
    values = (weight / scales.float()[:, order]).round() + zeros[:, order]
    return values.clamp(-half, half - 1).to(torch.int8)


def compressed(
    scheme: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16
) -> Callable[[str, torch.Tensor], Written]:
    """Return what writes a linear as compressed_tensors does.

    Args:
        scheme: a group of `config_groups`, with its `format`.
        dtype: of the scales.
    """
    parsed = QuantizationScheme(**{**scheme, "targets": ["Linear"]})
    arguments = parsed.weights
    compressor = BaseCompressor.get_value_from_registry(parsed.format)

    def linear(name: str, weight: torch.Tensor) -> Written:
        group = arguments.group_size if arguments.strategy == "group" else weight.shape[1]
        options = {"symmetric": arguments.symmetric, "dtype": dtype}
        scales, zeros = rounded(weight, arguments.num_bits, group, **options)
        state = {"weight": weight, "weight_scale": scales, "weight_zero_point": zeros}
        stored = compressor.compress(state, parsed)
        in_float32 = {**stored, "weight_scale": scales.float()}
        wide = compressor.decompress(in_float32, parsed)["weight"]
        if parsed.input_activations is not None and not parsed.input_activations.dynamic:
            stored["input_scale"] = torch.tensor([0.02], dtype=dtype)
        return stored, wide

    return linear


def ordered(linear: Callable[[str, torch.Tensor], Written]) -> Callable[[str, torch.Tensor], Any]:
    """Return what writes linears with `actorder` "group", which releases before 0.20 did.

    Inputs of one matrix have the same order, because they are sorted by what calibration saw.
    """

    def with_order(name: str, weight: torch.Tensor) -> Written:
        inputs = weight.shape[1]
        sorting = permutation(inputs)
        fields, wide = linear(name, weight[:, sorting])
        groups = fields["weight_scale"].shape[1]
        order = torch.empty(inputs, dtype=torch.int32)
        order[sorting] = torch.arange(inputs, dtype=torch.int32) // (inputs // groups)
        back = sorting.argsort()
        half = 8
        packed = fields["weight_packed"]
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        values = ((packed[..., None] >> shifts & 15).flatten(1) - half).to(torch.int8)
        fields["weight_packed"] = pack_to_int32(values[:, back], 4)
        fields["weight_g_idx"] = order
        return fields, wide[:, back]

    return with_order


def permutation(inputs: int) -> torch.Tensor:
    return torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))


def gptq(
    bits: int,
    group: int,
    *,
    symmetric: bool = True,
    less: int = 1,
    desc_act: bool = False,
    g_idx: bool = True,
    bias: bool = False,
) -> Callable[[str, torch.Tensor], Written]:
    """Return what writes a linear as AutoGPTQ does.

    Args:
        group: -1: the whole row.
        less: how much less than the zero point is written: 1 in version 1, 0 in 2.
        g_idx: whether the file has it although it says nothing.
        bias: whether a bias of zeros is written, as early releases did.
    """

    def linear(name: str, weight: torch.Tensor) -> Written:
        outputs, inputs = weight.shape
        size = inputs if group == -1 else group
        sorting = permutation(inputs) if desc_act else torch.arange(inputs)
        order = torch.empty(inputs, dtype=torch.int64)
        order[sorting] = torch.arange(inputs) // size
        scales, zeros = rounded(
            weight[:, sorting], bits, size, symmetric=symmetric, dtype=torch.float16
        )
        values = values_of(weight, scales, zeros, bits, order)
        wide = (values.float() - zeros[:, order]) * scales.float()[:, order]
        half = 2 ** (bits - 1)
        written = (zeros.int() + half - less) % (2 * half)  # 0 wraps around in version 1
        fields = {
            "qweight": packed_down(values.T.int() + half, bits),
            "qzeros": packed_down(written, bits).T,
            "scales": scales.T,
        }
        if g_idx:
            fields["g_idx"] = order.int()
        if bias:
            fields["bias"] = torch.zeros(outputs, dtype=torch.float16)
        return fields, wide

    return linear


def packed_down(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Return `numbers` [n, k] in words [n * bits / 32, k] int32, the first in the lowest bits."""
    per_word = 32 // bits
    grouped = numbers.reshape(len(numbers) // per_word, per_word, -1).long()
    shifts = torch.arange(0, 32, bits)[:, None]
    words = (grouped << shifts).sum(1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


AWQ_PACKED = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight columns a word has, from its lowest bits on: AutoAWQ's pack order."""


def awq(group: int) -> Callable[[str, torch.Tensor], Written]:
    """Return what writes a linear as AutoAWQ does for its kernel GEMM."""

    def linear(name: str, weight: torch.Tensor) -> Written:
        size = weight.shape[1] if group == -1 else group
        scales, zeros = rounded(weight, 4, size, symmetric=False, dtype=torch.float16)
        order = torch.arange(weight.shape[1]) // size
        values = values_of(weight, scales, zeros, 4, order)

        def packed(numbers: torch.Tensor) -> torch.Tensor:
            """Return `numbers` [out, k] in words [k, out / 8]."""
            eights = (numbers.int() + 8).reshape(len(numbers) // 8, 8, -1)[:, list(AWQ_PACKED)]
            return packed_down(eights.flatten(0, 1), 4).T

        fields = {"qweight": packed(values), "qzeros": packed(zeros), "scales": scales.T}
        fields = {suffix: tensor.contiguous() for suffix, tensor in fields.items()}
        return fields, converted_awq(fields, size)

    return linear


def converted_awq(fields: Tensors, group: int) -> torch.Tensor:
    """Return the weight that compressed_tensors gets out of AWQ's tensors, in float32."""
    converter = AutoAWQConverter(group_size=group)
    tensors = converter.process({f"x.{suffix}": tensor for suffix, tensor in fields.items()})
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": False,
        "strategy": "group",
        "group_size": group,
    }
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, format="pack-quantized")
    state = {name.removeprefix("x."): tensor for name, tensor in tensors.items()}
    state["weight_scale"] = state["weight_scale"].float()
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    return compressor.decompress(state, scheme)["weight"]
