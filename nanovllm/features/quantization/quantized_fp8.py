"""Linears that a checkpoint stores in FP8: which they are, and how they are loaded."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from nanovllm.features.quantization.fp8 import FP8, Fp8Weight
from nanovllm.features.quantization.quantized_fields import (
    Field,
    LoadedField,
    QuantizedNumbers,
    first_row,
    row_ranges,
)
from nanovllm.features.quantization.rounding import EXACT, rounded_rows
from nanovllm.features.quantization.settings import (
    WHERE,
    Names,
    check_supported,
    one_form,
    read_names,
    unsupported,
)
from nanovllm.kernels.torch_kernels import TORCH, Kernels, LinearMethod
from nanovllm.layers.linear import WeightFormat, WeightModule
from nanovllm.layers.pieces import HeadLinear
from nanovllm.loading.shards import Shard

_MAX_BLOCK = 1024
_FIXED: dict[str, tuple[Any, ...]] = {
    "fmt": (None, "e4m3", "float8_e4m3fn"),
    "activation_scheme": ("dynamic", "static"),
    "scale_fmt": (None, "float", "ue8m0"),
    "weight_per_tensor": (None, False),
    "act_per_tensor": (None, False),
    "dequantize": (None, False),
}
"""Supported values of fields that change the layout. How inputs are rounded is checked and not
kept: GPUs that multiply FP8 find the scales of inputs while they run, other devices never round
them. "ue8m0" says that scales are powers of two: in a file they are float32 as any others."""
_EXCLUDED = ("modules_to_not_convert", "ignored_layers")


class Fp8Format(WeightFormat):
    """A checkpoint whose linears are in FP8, but for some that are excluded: `quantization_config`
    as those of Qwen and Mistral have it. Without a block size, a linear has one scale.
    """

    name = "FP8"

    def __init__(self, config: dict[str, Any]) -> None:
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
        self.scale = Field("weight_scale_inv", torch.float32, sizes[1], outputs=sizes[0])
        self._excluded = Names(excluded, f"{WHERE}: {' and '.join(_EXCLUDED)}")

    def excludes(self, name: str) -> bool:
        """Return whether the linear at dotted path `name` is not in FP8."""
        return self._excluded.contains_part(name) or self._excluded.matches(name)

    def quantized(self, matrix: WeightModule, names: list[str]) -> "QuantizedFp8 | None":
        forms = [None if self.excludes(name) else self.name for name in names]
        form = one_form(names, forms, " and ".join(_EXCLUDED))
        return None if form is None else QuantizedFp8(self.scale, matrix)


class QuantizedFp8(QuantizedNumbers):
    """Loads the FP8 weights and the scales of the checkpoint linears that one layer merges.

    They are kept on GPUs. CPUs have no products in FP8, and converting a weight for each of them
    takes several times as long as the product, so there it is widened, or rounded to integers.
    """

    def __init__(self, scale: Field, matrix: WeightModule) -> None:
        super().__init__(matrix, "FP8")
        self._is_exact = isinstance(matrix, EXACT)
        self._is_of_heads = isinstance(matrix, HeadLinear)  # products with it are not in FP8
        self._rounding = ""
        self._values: torch.Tensor | None = None
        self._scales = LoadedField(scale, self._device)
        self._loaded = [self._scales]

    def _tensors(self, weight: Shard) -> Iterator[Shard]:
        if self._values is None:
            self._values = torch.empty(self._shape, dtype=FP8, device=self._device)
        first = first_row(weight)
        target = self._values[first : first + len(weight.target)]
        yield dataclasses.replace(weight, target=target)
        yield self._scales.shard(weight)

    def round_to(self, quantization: str, kernels: Kernels) -> None:
        """Let `method` round a weight that it would widen to `quantization`, in integers.

        Raises:
            ConfigError: no group size of `quantization` divides the inputs.
        """
        if self._device.type == "cpu" and not self._is_exact:
            rounded_rows(quantization, torch.empty(self._shape, device="meta"), kernels)
            self._rounding = quantization

    def _kept(self, dtype: torch.dtype, kernels: Kernels) -> tuple[LinearMethod | None, str]:
        self._scales.check_finite()
        if self._is_of_heads:
            return None, "small linears of heads keep their bits"
        if self._device.type != "cpu":
            return self._weight(dtype, kernels), "kept in 8 bits"
        why = "CPUs have no products in FP8"
        if not self._rounding:
            return None, why
        kept = self._weight(dtype, kernels)
        like = torch.empty(self._shape, dtype=dtype, device="meta")
        rounded = rounded_rows(self._rounding, like, kernels)
        for start, stop in row_ranges(0, *self._shape):
            rounded.store(start, kept.embedding(torch.arange(start, stop)))
        return rounded.method(), f"rounded to {self._rounding} because {why}"

    def _wide(self, dtype: torch.dtype) -> torch.Tensor:
        kept = self._weight(dtype, TORCH)
        wide = torch.empty(self._shape, dtype=dtype, device=self._device)
        for start, stop in row_ranges(0, *self._shape):
            wide[start:stop] = kept.embedding(torch.arange(start, stop, device=self._device))
        return wide

    def _weight(self, dtype: torch.dtype, kernels: Kernels) -> Fp8Weight:
        """Return the weight in FP8, which is not loaded any more."""
        assert self._values is not None
        values = self._values
        self._values = None
        scales = self._scales.rows(0, len(values))
        block = self._scales.field.group or values.shape[1]
        return Fp8Weight(values, scales, block, dtype, kernels)
