"""Weights that a checkpoint stores as special numbers and scales: what they have in common.

A `Field` says how one tensor that stands in place of a weight [n, k] is laid out in a file; a
`LoadedField` has its rows for a matrix; `QuantizedNumbers` loads them and makes the method.
Integers of 4 or 8 bits are in words of 32, the lowest bits first. They are numbers from 0 up, and
lose half of their range, so that they fit int8.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from nanovllm.errors import CheckpointError, ConfigError, UnsupportedModelError
from nanovllm.kernels.cpu.build import PANEL
from nanovllm.kernels.torch_kernels import Kernels, LinearMethod, PlainWeight
from nanovllm.layers.experts import StackedLinear
from nanovllm.layers.linear import WeightModule
from nanovllm.layers.pieces import HeadLinear, SmallLinear
from nanovllm.loading.shards import Shard
from nanovllm.utils.distributed import tensor_parallel

WORD_BITS = 32
NUMBERS_AT_ONCE = 2**18


class Field(NamedTuple):
    """A tensor whose rows are outputs, and whose columns are inputs, or groups of them."""

    suffix: str
    """Of its name, which follows the linear's."""
    dtype: torch.dtype
    group: int | None = 1
    """Inputs that share a number; None: all share it."""
    packed: str = ""
    """What the integers of a word are: "inputs", neighbours in a row; "outputs", in a column."""
    bits: int = 8
    """Of an integer, if they are packed."""
    order: tuple[int, ...] | None = None
    """See `unpack_rows`."""
    transposed: bool = False
    """Whether the file has the inputs before the outputs."""
    outputs: int | None = 1
    """Outputs that share a number; None: all of a linear."""
    flat: bool = False
    """Whether the file has the only column as a tensor of one dimension."""

    @property
    def per_row(self) -> int | None:
        """Return the outputs of a row; None: all."""
        return WORD_BITS // self.bits if self.packed == "outputs" else self.outputs

    @property
    def per_column(self) -> int | None:
        """Return the inputs of a column; None: all."""
        words = self.packed == "inputs" and self.group is not None
        return (self.group or 1) * (WORD_BITS // self.bits) if words else self.group

    def shape(self, outputs: int, inputs: int) -> tuple[int, int]:
        """Return the shape for a weight [outputs, inputs], before it is transposed."""
        columns = 1 if self.per_column is None else -(-inputs // self.per_column)
        return -(-outputs // (self.per_row or outputs)), columns


class FieldPart(NamedTuple):
    """The rows of a field that belong to a part of a matrix."""

    name: str
    """Of the checkpoint's tensor."""
    tensor: torch.Tensor
    skipped: int
    """Outputs in the first row of `tensor` that are not of this part."""
    rows: int
    """Outputs of the part."""
    shape: tuple[int, ...]
    """Of the whole linear's weight."""


class LoadedField:
    """A field of all linears that one matrix merges.

    Args:
        device: of the memory.
        whole: whether each rank has the columns of all inputs.
    """

    def __init__(self, field: Field, device: torch.device, *, whole: bool = False) -> None:
        self.field = field
        self._device = device
        self._whole = whole
        self._parts: dict[int, FieldPart] = {}

    @property
    def parts(self) -> list[FieldPart]:
        """Return the parts, in the order of the rows."""
        return [part for _, part in sorted(self._parts.items())]

    def shard(self, weight: Shard) -> Shard:
        """Return what loads the field of `weight`, a part of a linear's [outputs, inputs].

        Raises:
            ConfigError: this rank's inputs begin or end inside a column.
        """
        field = self.field
        outputs, inputs = weight.shape
        rows, own_inputs = weight.target.shape
        first = first_row(weight)
        start = weight.start
        skipped = 0
        if weight.dim == 0:
            start, skipped = divmod(start, field.per_row or outputs)
        elif self._whole or field.per_column is None:
            start = 0
            own_inputs = inputs
        else:
            self._check_columns(weight, field.per_column)
            start //= field.per_column
        name = weight.name.removesuffix("weight") + field.suffix
        if first not in self._parts:
            shape = field.shape(skipped + rows, own_inputs)
            memory = torch.empty(shape, dtype=field.dtype, device=self._device)
            self._parts[first] = FieldPart(name, memory, skipped, rows, weight.shape)
        shape = field.shape(outputs, inputs)
        memory = self._parts[first].tensor
        if field.flat:
            return Shard(name, shape[:1], memory[:, 0], start=start)
        shape = (shape[1], shape[0]) if field.transposed else shape
        return Shard(name, shape, memory, weight.dim, start, transposed=field.transposed)

    def _check_columns(self, weight: Shard, per_column: int) -> None:
        stop = weight.start + weight.target.shape[1]
        if weight.start % per_column or (stop % per_column and stop < weight.shape[1]):
            unit = "packed word" if self.field.packed == "inputs" else "group"
            raise ConfigError(
                f"tensor_parallel_size {tensor_parallel().size} cuts {weight.name} {weight.shape} "
                f"within a {unit} of {per_column} inputs of {self.field.suffix}; use a smaller size"
            )

    def check_finite(self) -> None:
        """Raise CheckpointError if a number is not finite."""
        for part in self.parts:
            if not part.tensor.isfinite().all():
                raise CheckpointError(f"{part.name} has a number that is not finite")

    def release(self) -> None:
        """Forget what was loaded."""
        self._parts.clear()

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return the rows of outputs [start, stop) of the matrix; int8 if they are packed."""
        found = []
        for first, part in sorted(self._parts.items()):
            low = max(start, first) - first
            high = min(stop, first + part.rows) - first
            if low < high:
                found.append(self._unpacked(part, low, high))
        return torch.cat(found)

    def _unpacked(self, part: FieldPart, start: int, stop: int) -> torch.Tensor:
        field = self.field
        if field.packed == "outputs":
            skipped = part.skipped + start
            count = stop - start
            return unpack_rows(part.tensor, field.bits, skipped, count, field.order)
        if field.outputs != 1:
            rows = torch.arange(part.skipped + start, part.skipped + stop, device=self._device)
            scales = rows // (field.outputs or part.shape[0])
            return part.tensor[scales.clamp(max=len(part.tensor) - 1)]  # a padded vocabulary ends
        rows = part.tensor[start:stop]
        return unpack_columns(rows, field.bits) if field.packed else rows


class LoadedVector:
    """A small tensor of each linear, such as the order of its inputs."""

    def __init__(
        self, suffix: str, dtype: torch.dtype, device: torch.device, fill: int = 0
    ) -> None:
        self._suffix = suffix
        self._dtype = dtype
        self._device = device
        self._fill = fill
        self._tensors: dict[int, tuple[str, torch.Tensor]] = {}

    def shard(
        self, weight: Shard, size: int, own: int | None = None, start: int = 0, **options: bool
    ) -> Shard:
        """Return what loads the tensor [size] of the linear with `weight`.

        Args:
            own: how many of its numbers this rank has, from `start` on; None: all.
            options: of `Shard`.
        """
        first = first_row(weight)
        name = weight.name.removesuffix("weight") + self._suffix
        if first not in self._tensors:
            shape = size if own is None else own
            memory = torch.full((shape,), self._fill, dtype=self._dtype, device=self._device)
            self._tensors[first] = name, memory
        return Shard(name, (size,), self._tensors[first][1], start=start, **options)

    def items(self) -> list[tuple[str, torch.Tensor]]:
        """Return the names and the tensors, in the order of the rows."""
        return [item for _, item in sorted(self._tensors.items())]


def first_row(weight: Shard) -> int:
    """Return the row of the matrix where the part `weight` of it begins."""
    return weight.target.storage_offset() // weight.target.shape[1]


def row_ranges(
    start: int, stop: int, width: int, at_once: int = NUMBERS_AT_ONCE
) -> Iterator[tuple[int, int]]:
    """Yield the first row of each part of rows [start, stop), and the row after the part.

    Parts bound the memory of temporary copies. They have a multiple of 32 rows, but for the last,
    and at most `at_once` numbers, if 32 rows have no more.
    """
    count = max(1, at_once // max(1, width) // 32) * 32
    for first in range(start, stop, count):
        yield first, min(first + count, stop)


class PanelRows:
    """Passes the rows of a weight on as they are loaded, in parts of whole panels.

    Rows that are not cut where the kernels' panels are wait for the rest of their weight.

    Args:
        num_rows: of the weight.
        store: takes the number of a part's first row, and the part.
        at_once: see `row_ranges`.
    """

    def __init__(
        self,
        num_rows: int,
        store: Callable[[int, torch.Tensor], None],
        at_once: int = NUMBERS_AT_ONCE,
    ) -> None:
        self._num_rows = num_rows
        self._store = store
        self._at_once = at_once
        self._waiting: torch.Tensor | None = None
        self._has_panels = True

    def expect(self, first: int) -> None:
        """Expect a tensor that begins with row `first`. Comes before its rows are added."""
        if first % PANEL:
            self._has_panels = False

    def add(self, first: int, rows: torch.Tensor) -> None:
        """Take rows, whose memory the caller may use again."""
        if self._has_panels:
            self._pass_on(first, rows)
            return
        if self._waiting is None:
            self._waiting = rows.new_zeros(self._num_rows, rows.shape[1])
        self._waiting[first : first + len(rows)] = rows

    def finish(self) -> None:
        """Pass on what waits. Comes after all rows."""
        if self._waiting is not None:
            self._pass_on(0, self._waiting)
            self._waiting = None

    def _pass_on(self, first: int, rows: torch.Tensor) -> None:
        num_rows, width = rows.shape
        for start, stop in row_ranges(0, num_rows, width, self._at_once):
            self._store(first + start, rows[start:stop])


def unpack_columns(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the integers [n, k] int8 of `words` [n, words], of any dtype, packed along a row.

    Args:
        bits: 4 or 8, so that an integer is in a byte: those of a word are the lowest first.
    """
    as_bytes = words.contiguous().view(torch.uint8)
    if bits == 4:
        as_bytes = torch.stack([as_bytes & 15, as_bytes >> 4], -1).flatten(1)
    return _centred(as_bytes, bits)


def unpack_rows(
    words: torch.Tensor, bits: int, start: int, count: int, order: tuple[int, ...] | None = None
) -> torch.Tensor:
    """Return the integers [count, k] int8 of `words` [words, k] int32, packed along a column.

    Args:
        start: the row of the first of them.
        order: where in a word each of its integers is; None: in turn.
    """
    per_word = WORD_BITS // bits
    shifts = torch.tensor(order or tuple(range(per_word)), device=words.device) * bits
    rows = torch.arange(start, start + count, device=words.device)
    found = words[rows // per_word] >> shifts[rows % per_word, None].int() & (2**bits - 1)
    return _centred(found.to(torch.uint8), bits)


def _centred(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Return uint8 `numbers` less half of their range, as int8."""
    return (numbers - 2 ** (bits - 1)).view(torch.int8)


class QuantizedNumbers:
    """Base of what loads the checkpoint linears that one matrix merges; see `QuantizedWeight`.

    What the kernels do not hold is widened to the model's dtype.

    Args:
        label: names the form, for the log and for errors.
    """

    def __init__(self, matrix: WeightModule, label: str) -> None:
        assert matrix.weight is not None
        self.label = label
        self.description = ""
        self._shape = tuple(matrix.weight.shape)
        self._device = matrix.weight.device
        self._is_experts = isinstance(matrix, StackedLinear)
        self._is_gathered = matrix.is_gathered
        self._is_exact = isinstance(matrix, (SmallLinear, HeadLinear))
        self._loaded: list[LoadedField] = []
        """What is released once the method is made."""

    def shards(self, weight: Shard) -> Iterator[Shard]:
        """Yield the tensors that stand in place of `weight`."""
        if weight.index is not None:
            raise UnsupportedModelError(
                f"{weight.name}: {self.label} is not supported where all experts are in one tensor"
            )
        yield from self._tensors(weight)

    def method(self, dtype: torch.dtype, kernels: Kernels) -> LinearMethod:
        """Return what multiplies.

        Raises:
            CheckpointError: a scale is not a finite number, or another tensor is out of its range.
            ConfigError: experts on a GPU.
        """
        if self._is_experts and kernels.name == "triton":
            raise ConfigError(f"experts in {self.label} run on CPUs alone; choose device='cpu'")
        method, words = self._kept(dtype, kernels)
        if method is None:
            words = f"widened to {str(dtype).removeprefix('torch.')} because {words}"
            wide = self._wide(dtype)
            method = kernels.pack(wide, is_embedding=self._is_gathered) or PlainWeight(wide)
        self.description = f"in {self.label}: {words}"
        for field in self._loaded:
            field.release()
        return method

    def _tensors(self, weight: Shard) -> Iterator[Shard]:
        """Yield the tensors that stand in place of `weight`, which is of one linear."""
        raise NotImplementedError

    def _kept(self, dtype: torch.dtype, kernels: Kernels) -> tuple[LinearMethod | None, str]:
        """Return the method of few bits, and what it is; or None, and why there is none."""
        raise NotImplementedError

    def _wide(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight in `dtype`."""
        raise NotImplementedError
