"""Weights of integers that a checkpoint stores: loaded in its layout, kept in their bits if exact.

What the kernels do not hold exactly is widened to the model's dtype, and so is every weight of a
model in float32.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from nanovllm.errors import CheckpointError
from nanovllm.features.quantization.integer import IntRows, int_tensor
from nanovllm.features.quantization.quantized_fields import (
    Field,
    LoadedField,
    LoadedVector,
    QuantizedNumbers,
    row_ranges,
)
from nanovllm.kernels.torch_kernels import Kernels, LinearMethod
from nanovllm.layers.linear import WeightModule
from nanovllm.loading.shards import Shard

_NO_GROUP = -1
"""Stands in place of an input's group where all inputs are in the order of their places."""


class IntegerForm(NamedTuple):
    """The tensors of a linear in a checkpoint. A weight is scale * (value - zero)."""

    label: str
    """For the log and for errors."""
    bits: int
    group: int | None
    """Neighbours in a row that share a scale; None: the whole row does."""
    values: Field
    scales: Field
    zeros: Field | None
    zeros_less: int = 0
    """How much less than the zero point is in the file."""
    order: str | None = None
    """Suffix of the tensor that says each input's group; None: its place does."""
    in_place: bool = False
    """Whether it says what the place does, too. A file may lack it."""
    shape: str | None = None
    """Suffix of the tensor that repeats the shape of the weight."""
    maybe_bias: bool = False
    """Whether a linear without a bias may have one of zeros."""

    def __str__(self) -> str:
        return self.label


class QuantizedIntegers(QuantizedNumbers):
    """The weight of a matrix in such a form."""

    def __init__(self, matrix: WeightModule, form: IntegerForm) -> None:
        super().__init__(matrix, form.label)
        self._form = form
        device = self._device
        self._has_bias = getattr(matrix, "bias", None) is not None
        ordered = form.order is not None and not form.in_place
        self._values = LoadedField(form.values, device)
        self._scales = LoadedField(form.scales, device, whole=ordered)
        self._zeros = LoadedField(form.zeros, device, whole=ordered) if form.zeros else None
        self._orders = LoadedVector(form.order or "", torch.int32, device, fill=_NO_GROUP)
        self._shapes = LoadedVector(form.shape or "", torch.int64, device)
        self._biases = LoadedVector("bias", torch.float32, device)
        self._loaded = [each for each in (self._values, self._scales, self._zeros) if each]

    def _tensors(self, weight: Shard) -> Iterator[Shard]:
        yield self._values.shard(weight)
        yield self._scales.shard(weight)
        if self._zeros is not None:
            yield self._zeros.shard(weight)
        outputs, inputs = weight.shape
        if self._form.order is not None:
            own, start = (weight.target.shape[1], weight.start) if weight.dim else (inputs, 0)
            yield self._orders.shard(weight, inputs, own, start, optional=self._form.in_place)
        if self._form.shape is not None:
            yield self._shapes.shard(weight, 2)
        if self._form.maybe_bias and not self._has_bias:
            yield self._biases.shard(weight, outputs, optional=True)

    def _check(self) -> None:
        self._scales.check_finite()
        for name, tensor in self._biases.items():
            if tensor.any():
                raise CheckpointError(f"{name} is not zero, but such a model's linear has no bias")
        outputs = {part.name.rpartition(".")[0]: part.shape for part in self._values.parts}
        for name, tensor in self._shapes.items():
            found = tuple(tensor.tolist())
            expected = outputs[name.rpartition(".")[0]]
            if found not in (expected, (0, 0)):  # zeros are dummy weights
                raise CheckpointError(f"{name} says {found}, the config says {expected}")

    def _groups(self) -> list[torch.Tensor]:
        """Return the group of each input, [k] int64, for each part of the matrix."""
        k = self._shape[1]
        size = self._form.group or self._shape[1]
        place = torch.arange(k, device=self._device) // size
        found = [place] * len(self._values.parts)
        for i, (name, order) in enumerate(self._orders.items()):
            if (order == _NO_GROUP).all():
                continue
            low, high = (int(end) for end in order.aminmax())
            num_groups = -(-self._scales.parts[i].shape[1] // size)
            if low < 0 or high >= num_groups:
                raise CheckpointError(
                    f"{name} has group {low if low < 0 else high}, must be from 0 to "
                    f"{num_groups - 1}"
                )
            if not self._form.in_place:
                found[i] = order.long()
            elif not torch.equal(order - order[0], place) and order.any():
                raise CheckpointError(
                    f"{name} has inputs in another order, but the config says that there is none"
                )
        return found

    def _kept(self, dtype: torch.dtype, kernels: Kernels) -> tuple[LinearMethod | None, str]:
        self._check()
        groups = self._groups()
        n, k = self._shape
        size = self._form.group or k
        if dtype == torch.float32:
            return None, "the model's dtype is float32"
        if self._is_exact:
            return None, "small linears keep their bits"
        if any(not torch.equal(other, groups[0]) for other in groups):
            return None, "linears that are computed as one order their inputs differently"
        if size % 32:
            return None, f"groups of {size} are not a multiple of 32"
        used, counts = torch.unique(groups[0], return_counts=True)
        if (counts != size).any():
            return None, f"groups do not all have {size} inputs"
        order = groups[0].argsort(stable=True)
        in_place = torch.equal(order, torch.arange(k, device=self._device))
        inputs = None if in_place else order.int()
        has_zeros = self._zeros is not None and bool(self._zero_points(0, n).any())
        rows = IntRows(n, dtype, kernels)
        for start, stop in row_ranges(0, n, k):
            values = self._numbers(start, stop)
            scales = self._scales.rows(start, stop)[:, used]
            values = values if in_place else values[:, order]
            zeros = self._zero_points(start, stop)[:, used] if has_zeros else None
            part = int_tensor(values, scales, self._form.bits, zeros=zeros, inputs=inputs)
            if part is None:
                return None, "16 bits do not hold its scales exactly"
            rows.store(start, part)
        return rows.method(), f"kept in {self._form.bits} bits"

    def _numbers(self, start: int, stop: int) -> torch.Tensor:
        """Return the values of rows [start, stop), [rows, k] int8."""
        values = self._values.rows(start, stop)[:, : self._shape[1]]
        limit = 2 ** (self._form.bits - 1)
        if not self._form.values.packed and self._form.bits < 8:
            low, high = values.aminmax()
            if low < -limit or high >= limit:
                names = ", ".join(part.name for part in self._values.parts)
                raise CheckpointError(f"{names}: a value does not fit {self._form.bits} bits")
        return values

    def _zero_points(self, start: int, stop: int) -> torch.Tensor:
        """Return the zero points of rows [start, stop), [rows, groups] int8."""
        assert self._zeros is not None
        zeros = self._zeros.rows(start, stop)
        if not self._form.zeros_less:
            return zeros
        half = 2 ** (self._form.bits - 1)
        return ((zeros.int() + half + self._form.zeros_less) % (2 * half) - half).to(torch.int8)

    def _wide(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight in `dtype`, each number rounded once."""
        wide = torch.empty(self._shape, dtype=dtype, device=self._device)
        end = 0
        for part, group in zip(self._values.parts, self._groups(), strict=True):
            first = end
            end += part.rows
            for start, stop in row_ranges(first, end, self._shape[1]):
                numbers = self._numbers(start, stop).float()
                if self._zeros is not None:
                    numbers -= self._zero_points(start, stop)[:, group]
                wide[start:stop] = numbers * self._scales.rows(start, stop)[:, group]
        return wide
