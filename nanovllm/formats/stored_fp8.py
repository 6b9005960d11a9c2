"""Linears that a checkpoint stores in FP8: which they are, and how they are loaded."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from nanovllm.checkpoint.shards import Shard
from nanovllm.errors import CheckpointError, ConfigError, UnsupportedModelError
from nanovllm.formats.fp8 import FP8, Fp8Weight
from nanovllm.formats.names import Names, read_names
from nanovllm.formats.packing import row_ranges
from nanovllm.formats.rounding import EXACT, rounded_rows
from nanovllm.formats.scheme import Scheme
from nanovllm.formats.settings import WHERE, check_supported, one_form, unsupported
from nanovllm.kernels.torch_kernels import Kernels, PlainWeight, WeightMethod
from nanovllm.layers.experts import StackedLinear
from nanovllm.layers.linear import Matrix
from nanovllm.utils.distributed import tensor_parallel

_MAX_BLOCK = 1024
_FIXED: dict[str, tuple[Any, ...]] = {
    "fmt": (None, "e4m3"),
    "activation_scheme": ("dynamic", "static"),
    "scale_fmt": (None, "float"),
    "weight_per_tensor": (None, False),
    "act_per_tensor": (None, False),
    "dequantize": (None, False),
}
"""Supported values of fields that change the layout. How inputs are rounded is checked and not
kept: GPUs that multiply FP8 find the scales of inputs while they run, other devices never round
them."""
_EXCLUDED = ("modules_to_not_convert", "ignored_layers")


class Fp8Layout(NamedTuple):
    """How linears are stored in FP8: each block of a weight has one scale."""

    scale_name: str
    """Of the tensor beside `weight` that holds a scale for each block. Its shape is
    [ceil(outputs / block_outputs), ceil(inputs / block_inputs)]."""
    block_outputs: int | None
    """None: one block spans all outputs of a checkpoint linear."""
    block_inputs: int | None
    """None: one block spans all inputs."""
    flat: bool = False
    """Whether the scales of all inputs lie in a tensor of one dimension."""

    def __str__(self) -> str:
        return "FP8"


class Fp8Format:
    """A checkpoint whose linears are in FP8, but for some that are excluded."""

    name = "FP8"

    def __init__(self, layout: Fp8Layout, excluded: Names) -> None:
        self.layout, self._excluded = layout, excluded

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Fp8Format":
        """Read `quantization_config` as the FP8 checkpoints of Qwen and Mistral have it. Without a
        block size, a linear has one scale.

        Raises:
            UnsupportedModelError: a setting is not implemented.
            CheckpointError: a field has the wrong type.
        """
        check_supported(config, _FIXED)
        excluded = [name for key in _EXCLUDED for name in read_names(config, key)]
        sizes = config.get("weight_block_size", ())
        if sizes is None:
            sizes = [None, None]
        elif not (
            isinstance(sizes, list)
            and len(sizes) == 2
            and all(type(size) is int and 0 < size <= _MAX_BLOCK for size in sizes)
        ):
            only = f"two integers from 1 to {_MAX_BLOCK}, such as [128, 128], or null"
            raise unsupported("weight_block_size", config.get("weight_block_size"), only)
        layout = Fp8Layout("weight_scale_inv", *sizes)
        return cls(layout, Names(excluded, f"{WHERE}: {' and '.join(_EXCLUDED)}"))

    def excludes(self, name: str) -> bool:
        """Return whether the linear at dotted path `name` is not in FP8."""
        return self._excluded.have_part(name) or self._excluded.match(name)

    def stored(self, matrix: Matrix, names: list[str]) -> "StoredFp8 | None":
        forms = [None if self.excludes(name) else self.layout for name in names]
        layout = one_form(names, forms, " and ".join(_EXCLUDED))
        return None if layout is None else StoredFp8(layout, matrix)


def stored_float(scheme: Scheme, matrix: Matrix, names: list[str]) -> "StoredFp8":
    """Return how a checkpoint of compressed-tensors stores FP8 linears.

    How `scheme` rounds inputs is checked and not kept: GPUs that multiply FP8 find the scales of
    inputs while they run, other devices never round them.

    Raises:
        UnsupportedModelError: the scheme is not implemented.
    """
    blocks: dict[str, tuple[int | None, int | None]] = {
        "tensor": (None, None),
        "channel": (1, None),
        "group": (1, scheme.group_size),
        "block": scheme.block or (None, None),
    }
    inputs = scheme.inputs
    found = scheme.bits, scheme.type, scheme.symmetric, scheme.strategy in blocks
    if found != (8, "float", True, True) or (inputs and (inputs.bits, inputs.type) != (8, "float")):
        listed = "none" if inputs is None else f"{inputs.bits} bits, type {inputs.type}"
        raise UnsupportedModelError(
            f"{names[0]}: {scheme.format} of {scheme.bits} bits, type {scheme.type}, strategy "
            f"{scheme.strategy}, symmetric {scheme.symmetric}, input_activations {listed} is not "
            f"supported (only 8, float, {', '.join(blocks)}, True, none or 8 bits, type float)"
        )
    return StoredFp8(Fp8Layout("weight_scale", *blocks[scheme.strategy]), matrix)


class StoredFp8:
    """Loads the FP8 weights and the scales of the checkpoint linears that one layer merges.

    They are kept on GPUs. CPUs have no products in FP8, and to convert a weight for each of them
    takes several times as long as the product, so there it is widened, or rounded to integers.
    """

    def __init__(self, fp8: Fp8Layout, matrix: Matrix) -> None:
        assert matrix.weight is not None
        self._fp8, self._is_experts = fp8, isinstance(matrix, StackedLinear)
        self._is_exact, self._rounding = isinstance(matrix, EXACT), ""
        self._shape, self._device = matrix.weight.shape, matrix.weight.device
        self.label, self.description = "FP8", ""
        self._values: torch.Tensor | None = None
        self._scales: dict[int, _Scales] = {}
        """By first row of a part of the matrix."""

    def shards(self, weight: Shard) -> Iterator[Shard]:
        """Yield `weight` in FP8, and its scales."""
        fp8 = self._fp8
        _check_blocks(weight, fp8)
        if weight.index is not None:
            raise UnsupportedModelError(
                f"{weight.name}: experts in FP8 must have tensors of their own, not one for all"
            )
        if self._values is None:
            self._values = torch.empty(self._shape, dtype=FP8, device=self._device)
        first, rows = weight.target.storage_offset() // self._shape[1], len(weight.target)
        name = weight.name.removesuffix("weight") + fp8.scale_name
        if first not in self._scales:
            shape = _scales_shape(weight.target.shape, fp8)
            self._scales[first] = _Scales(name, torch.ones(shape, device=self._device), rows)
        yield dataclasses.replace(weight, target=self._values[first : first + rows])
        block = (fp8.block_outputs, fp8.block_inputs)[weight.dim] or weight.shape[weight.dim]
        shape, scales = _scales_shape(weight.shape, fp8), self._scales[first].scales
        start = weight.start // block
        if fp8.flat:
            yield Shard(name, shape[:1], scales[:, 0], 0, 0 if weight.dim else start)
        else:
            yield Shard(name, shape, scales, weight.dim, start)

    def round_to(self, quantization: str, kernels: Kernels) -> None:
        """Let `method` round a weight that it would widen to `quantization`, "int8" or "int4".

        Raises:
            ConfigError: no group size of `quantization` divides the inputs.
        """
        if self._device.type == "cpu" and not self._is_exact:
            rounded_rows(quantization, torch.empty(self._shape, device="meta"), kernels)
            self._rounding = quantization

    def method(self, dtype: torch.dtype, kernels: Kernels) -> WeightMethod:
        """Return what multiplies.

        Raises:
            CheckpointError: a scale is no finite number.
            ConfigError: experts on a GPU.
        """
        assert self._values is not None
        if self._is_experts and kernels.name == "triton":
            raise ConfigError("experts in FP8 run on CPUs alone; choose device='cpu'")
        by_row = []
        for _, (name, scales, rows) in sorted(self._scales.items()):
            if not scales.isfinite().all():
                raise CheckpointError(f"{name} has a number that is not finite")
            by_row.append(scales.repeat_interleave(self._fp8.block_outputs or rows, 0)[:rows])
        values, self._values, self._scales = self._values, None, {}
        block = self._fp8.block_inputs or self._shape[1]
        kept = Fp8Weight(values, torch.cat(by_row), block, dtype, kernels)
        if self._device.type != "cpu":
            self.description = "in FP8: kept in 8 bits"
            return kept
        why = "because CPUs have no products in FP8"
        parts = [torch.arange(*ends) for ends in row_ranges(0, *self._shape)]
        if self._rounding:
            self.description = f"in FP8: rounded to {self._rounding} {why}"
            like = torch.empty(self._shape, dtype=dtype, device="meta")
            rounded = rounded_rows(self._rounding, like, kernels)
            for part in parts:
                rounded.store(int(part[0]), kept.embedding(part))
            return rounded.method()
        self.description = f"in FP8: widened to {str(dtype).removeprefix('torch.')} {why}"
        wide = torch.empty(self._shape, dtype=dtype)
        for part in parts:
            wide[part[0] : part[-1] + 1] = kept.embedding(part)
        return kernels.pack(wide, is_embedding=self._is_experts) or PlainWeight(wide)


class _Scales(NamedTuple):
    """The scales of a part of a matrix."""

    name: str
    """Of the checkpoint's tensor."""
    scales: torch.Tensor
    """float32, one for each block."""
    rows: int
    """Of the part."""


def _check_blocks(shard: Shard, fp8: Fp8Layout) -> None:
    """Raise ConfigError unless `shard` consists of whole FP8 blocks."""
    block = (fp8.block_outputs, fp8.block_inputs)[shard.dim]
    stop = shard.start + shard.target.shape[shard.dim]
    if block and (shard.start % block or (stop % block and stop < shard.shape[shard.dim])):
        raise ConfigError(
            f"tensor_parallel_size {tensor_parallel().size} cuts {shard.name} "
            f"{shard.shape} within an FP8 block of {block}; use a smaller size"
        )


def _scales_shape(shape: tuple[int, ...], fp8: Fp8Layout) -> tuple[int, int]:
    """Return the shape of the scales that belong to a weight of `shape`."""
    outputs, inputs = shape
    return -(-outputs // (fp8.block_outputs or outputs)), -(-inputs // (fp8.block_inputs or inputs))
