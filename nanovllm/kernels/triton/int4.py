"""Products with 4-bit or 8-bit weights, which stay packed: 16-bit inputs, float32 sums.

Up to FEW rows the kernel multiplies with the integers themselves, which 16 bits hold exactly, and
scales the sum of each group. With more rows it scales a tile of weights and rounds it to the dtype
of x first. Imports triton: see `platform.cuda.triton_available`.
"""

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from nanovllm.kernels.triton.split_k import FEW, add_splits, new_counters, plan_launch

INT4, INT8, FP4 = range(3)  # what the words of a weight hold

_ROWS_AT_ONCE = 1024
"""Rows packed at once. Bounds the size of the copies."""
_SPLIT_PROGRAMS = 528
"""Maximum programs of a tile of rows whose inputs are split: four for each SM of an H100."""
_MANY = {"M": 128, "N": 128, "SPLITS": 1, "num_warps": 8, "num_stages": 3}
"""The launch options for more than FEW rows."""
_INT4 = tl.constexpr(INT4)
_INT8 = tl.constexpr(INT8)


class PackedInts(NamedTuple):
    """A weight [n, k] on the device: factor * scale * (value - zero), or with minimums factor *
    (scale * (value + 8) + minimum).

    A block is four parts of `part` neighbouring inputs. k is filled up to whole blocks.
    """

    # 4 bits: [n, blocks * part] int16. The four nibbles of word j of a block, lowest first, are
    # input j of each of the four parts: value + 8, or the bits of an E2M1 number. So a thread reads
    # neighbouring inputs of each part, and nothing is shuffled. 8 bits: [n, blocks * 4 * part] int8
    # in the order of the inputs.
    words: torch.Tensor
    scales: torch.Tensor  # [k / group, n] float16 or bfloat16: a tile of outputs reads neighbours
    zeros: torch.Tensor | None  # [k / group, n] int8
    minimums: torch.Tensor | None  # [k / group, n] float16
    factors: torch.Tensor | None  # [n] float32
    size: int  # k
    group: int
    part: int  # 32, or 16 if groups are not a multiple of 32
    kind: int  # INT4, INT8 or FP4

    def constants(self) -> dict[str, int]:
        """Return what the kernels know of the weight when they are compiled."""
        return {"SIZE": self.size, "GROUP": self.group, "PART": self.part, "KIND": self.kind}


def part_size(group: int, size: int) -> int:
    """Return the inputs of a part of a block, or 0 if the kernels do not support `group`."""
    if group % 32 == 0 or group >= size:
        return 32
    return 16 if group % 16 == 0 else 0


class IntFields(Protocol):
    """Rows of a weight [n, k] before they are packed: what `formats.integer.IntTensor` says."""

    @property
    def values(self) -> torch.Tensor: ...
    @property
    def scales(self) -> torch.Tensor: ...
    @property
    def minimums(self) -> torch.Tensor | None: ...
    @property
    def bits(self) -> int: ...
    @property
    def zeros(self) -> torch.Tensor | None: ...
    @property
    def factors(self) -> torch.Tensor | None: ...
    @property
    def inputs(self) -> torch.Tensor | None: ...
    @property
    def fp4(self) -> bool: ...


def supports(weight: IntFields, dtype: torch.dtype) -> bool:
    """Return whether there are kernels for `weight`, or rows of it, and inputs of `dtype`."""
    size = weight.values.shape[1]
    groups = weight.scales.shape[1]
    return dtype != torch.float32 and part_size(size // groups, size) > 0


class PackedIntWeight:
    """A weight of 4 or 8 bits that stays packed in each product. A CUDA graph can hold every call.

    Args:
        num_rows: of the weight; `store` fills them.
        like: some of its rows, which it `supports`.
        dtype: of inputs and results, float16 or bfloat16.
    """

    def __init__(self, num_rows: int, like: IntFields, dtype: torch.dtype) -> None:
        self._weight = empty_ints(num_rows, like)
        self._inputs = like.inputs
        self._dtype = dtype
        self._counters = new_counters(num_rows, like.values.device)

    def store(self, start: int, part: IntFields) -> None:
        """Replace the rows from `start` on by those of `part`."""
        self._weight = store_rows(self._weight, start, part)

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        x = x.contiguous() if self._inputs is None else x.index_select(1, self._inputs)
        return multiply(x, self._weight, bias, self._counters)

    def embedding(self, ids: torch.Tensor) -> torch.Tensor:
        return take_rows(self._weight, ids, self._inputs, self._dtype)


def empty_ints(num_rows: int, like: IntFields) -> PackedInts:
    """Return a weight of `num_rows` rows to `store_rows` in, without factors.

    Args:
        like: some of its rows; `part_size` of their group must not be 0.
    """
    size = like.values.shape[1]
    groups = like.scales.shape[1]
    group = size // groups
    part = part_size(group, size)
    kind = FP4 if like.fp4 else INT8 if like.bits == 8 else INT4
    width = -(-size // (4 * part)) * (4 * part if kind == INT8 else part)
    device = like.values.device

    def by_group(rows: torch.Tensor) -> torch.Tensor:
        return torch.empty(groups, num_rows, dtype=rows.dtype, device=device)

    return PackedInts(
        torch.empty(
            num_rows, width, dtype=torch.int8 if kind == INT8 else torch.int16, device=device
        ),
        by_group(like.scales),
        None if like.zeros is None else by_group(like.zeros),
        None if like.minimums is None else by_group(like.minimums),
        None,
        size,
        group,
        part,
        kind,
    )


def store_rows(weight: PackedInts, start: int, rows: IntFields) -> PackedInts:
    """Write `rows` over those of `weight` from `start` on; return it, with factors if `rows` have.

    Args:
        rows: with zeros and minimums where `weight` has them.
    """
    stop = start + len(rows.values)
    for first in range(0, len(rows.values), _ROWS_AT_ONCE):
        values = rows.values[first : first + _ROWS_AT_ONCE]
        words = _words(values, weight)
        weight.words[start + first : start + first + len(values)] = words
    for target, source in (
        (weight.scales, rows.scales),
        (weight.zeros, rows.zeros),
        (weight.minimums, rows.minimums),
    ):
        if target is not None:
            assert source is not None
            target[:, start:stop] = source.t()
    if rows.factors is not None:
        if weight.factors is None:
            ones = rows.factors.new_ones(len(weight.words))
            weight = weight._replace(factors=ones)
        assert weight.factors is not None
        weight.factors[start:stop] = rows.factors
    return weight


def _words(values: torch.Tensor, weight: PackedInts) -> torch.Tensor:
    """Return the words of rows `values` [m, k]."""
    block = 4 * weight.part
    values = F.pad(values, (0, -weight.size % block))
    if weight.kind == INT8:
        return values
    nibbles = (values + 8).to(torch.int32).view(len(values), -1, 4, weight.part)
    shifts = torch.arange(0, 16, 4, device=values.device)[:, None]
    return (nibbles << shifts).sum(2, dtype=torch.int32).to(torch.int16).flatten(1)


def multiply(
    x: torch.Tensor, weight: PackedInts, bias: torch.Tensor | None, splits_done: torch.Tensor
) -> torch.Tensor:
    """Return x times the transpose of `weight`, plus `bias`: [t, n] in the dtype of x.

    The bits of a row depend on its numbers, on the weight and its shape, on the GPU, and on which
    of these holds the number of rows: up to 16, up to 64, more. They do not depend on the other
    rows, nor on the order in which programs run.

    Args:
        x: [t, k] float16 or bfloat16, contiguous.
        splits_done: from `new_counters`. Launches that share it must run one after another.
    """
    assert x.is_contiguous()
    rows = len(x)
    outputs = len(weight.words)
    y = x.new_empty(rows, outputs)
    if not rows:
        return y
    steps = triton.cdiv(weight.size, 4 * weight.part)
    programs, partial, options = plan_launch(x, outputs, steps, _SPLIT_PROGRAMS, _MANY)
    _multiply[(programs,)](
        x, *weight[:5], bias, y, partial, splits_done, rows,
        OUTPUTS=outputs, **weight.constants(), FEW=rows <= FEW, **options,
    )  # fmt: skip
    return y


def take_rows(
    weight: PackedInts, ids: torch.Tensor, inputs: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return rows `ids` [t] int64 of `weight`: [t, k] of `dtype`.

    Args:
        inputs: [k] int32, the place of each of the weight's columns in the result.
    """
    y = torch.empty(len(ids), weight.size, dtype=dtype, device=ids.device)
    if len(ids):
        _take_rows[(len(ids), triton.cdiv(weight.size, 4 * weight.part))](
            ids, *weight[:5], inputs, y,
            OUTPUTS=len(weight.words), **weight.constants(), num_warps=1,
        )  # fmt: skip
    return y


@triton.jit
def _load_words(words, output, is_output, step, SIZE, PART: tl.constexpr, KIND: tl.constexpr):
    """Return the words [N, inputs] of block `step` if they hold 4 bits, otherwise a part of it."""
    BLOCK: tl.constexpr = 4 * PART
    WIDTH: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK * (BLOCK if KIND == _INT8 else PART)
    place = words + output[:, None] * WIDTH + step * PART + tl.arange(0, PART)[None, :]
    return tl.load(place, is_output[:, None], 0)


@triton.jit
def _to_numbers(words, index, dtype: tl.constexpr, KIND: tl.constexpr):
    """Return the numbers of part `index` of the words, exactly, in `dtype`."""
    MANTISSA: tl.constexpr = dtype.fp_mantissa_width
    BIAS: tl.constexpr = dtype.exponent_bias
    if KIND == _INT8:
        number = words.to(dtype)
    elif KIND == _INT4:  # put the bits below the mantissa of a power of two
        ONE_AND_UP: tl.constexpr = (BIAS + MANTISSA) << MANTISSA
        bits = (words >> (4 * index)) & 15 | ONE_AND_UP
        number = bits.to(tl.int16).to(dtype, bitcast=True) - ((1 << MANTISSA) + 8)
    else:
        HALF: tl.constexpr = (BIAS - 1) << MANTISSA
        bits = words >> (4 * index)
        size = bits & 7
        size = tl.where(size < 2, size * HALF, (size << (MANTISSA - 1)) + HALF)
        number = (size | ((bits & 8) << 12)).to(tl.int16).to(dtype, bitcast=True)
    return number


@triton.jit
def _scale_and_shift(
    groups, output, is_output, start, OUTPUTS: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr
):
    """Return float32 [N] of the group of input `start`: a weight is scale * number + shift."""
    scales, zeros, minimums = groups
    place = start // GROUP * OUTPUTS + output
    inside = is_output & (start < SIZE)
    scale = tl.load(scales + place, inside, 0.0).to(tl.float32)
    shift = tl.zeros_like(scale)
    if zeros is not None:
        shift -= scale * tl.load(zeros + place, inside, 0).to(tl.float32)
    if minimums is not None:
        shift += scale * 8 + tl.load(minimums + place, inside, 0.0).to(tl.float32)
    return scale, shift


@triton.jit
def _of_parts(
    groups, output, is_output, step, OUTPUTS: tl.constexpr, SIZE: tl.constexpr,
    GROUP: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Return scale and shift of each part of block `step`."""
    at = step * 4 * PART
    a = _scale_and_shift(groups, output, is_output, at, OUTPUTS, SIZE, GROUP)
    b = a
    c = a
    d = a
    if GROUP % (4 * PART) and GROUP < SIZE:  # a block has several groups
        b = _scale_and_shift(groups, output, is_output, at + PART, OUTPUTS, SIZE, GROUP)
        c = _scale_and_shift(groups, output, is_output, at + 2 * PART, OUTPUTS, SIZE, GROUP)
        d = _scale_and_shift(groups, output, is_output, at + 3 * PART, OUTPUTS, SIZE, GROUP)
    return a, b, c, d


@triton.jit(do_not_specialize=["rows"])
def _multiply(
    x, words, scales, zeros, minimums, factors, bias, y, partial, splits_done, rows,
    OUTPUTS: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr,
    KIND: tl.constexpr, FEW: tl.constexpr, M: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Compute one split of a tile of y, and y if it is the tile's last split to end.

    If there are FEW rows, scale sums of integers; otherwise round scaled weights. Programs with
    neighbouring ids read the same rows of the weight, which the L2 then holds.
    """
    BLOCK: tl.constexpr = 4 * PART
    STEPS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    dtype: tl.constexpr = x.dtype.element_ty
    tile = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    row_tiles = tl.cdiv(rows, M)
    row = (tile % row_tiles * M + tl.arange(0, M)).to(tl.int64)
    output = (tile // row_tiles * N + tl.arange(0, N)).to(tl.int64)
    is_row = row < rows
    is_output = output < OUTPUTS
    ones = tl.full([PART, N], 1.0, dtype)
    acc = tl.zeros([M, N], tl.float32)
    first = STEPS * split // SPLITS
    stop = STEPS * (split + 1) // SPLITS
    groups = scales, zeros, minimums
    following = _of_parts(groups, output, is_output, first, OUTPUTS, SIZE, GROUP, PART)
    for step in range(first, stop):
        of_parts = following  # which were read while the last block was multiplied
        following = _of_parts(groups, output, is_output, step + 1, OUTPUTS, SIZE, GROUP, PART)
        if KIND != _INT8:
            found = _load_words(words, output, is_output, step, SIZE, PART, KIND)
        for index in tl.static_range(4):
            if KIND == _INT8:
                found = _load_words(words, output, is_output, 4 * step + index, SIZE, PART, KIND)
            start = step * BLOCK + index * PART
            a = _load_x(x, row, is_row, start, SIZE, PART)
            number = _to_numbers(found, index, dtype, KIND)
            scale, shift = of_parts[index]
            if FEW:
                acc += tl.dot(a, tl.trans(number)) * scale[None, :]
                if zeros is not None or minimums is not None:
                    acc += tl.dot(a, ones) * shift[None, :]
            else:
                b = (number.to(tl.float32) * scale[:, None] + shift[:, None]).to(dtype)
                acc = tl.dot(a, tl.trans(b), acc)
    is_last = True
    if SPLITS > 1:
        acc, is_last = add_splits(acc, partial, splits_done, tile, split, SPLITS)
    if is_last:
        if factors is not None:
            acc *= tl.load(factors + output, is_output, 0.0)[None, :]
        if bias is not None:
            acc += tl.load(bias + output, is_output, 0.0).to(tl.float32)[None, :]
        place = y + row[:, None] * OUTPUTS + output[None, :]
        tl.store(place, acc.to(y.dtype.element_ty), is_row[:, None] & is_output[None, :])


@triton.jit
def _load_x(x, row, is_row, start, SIZE: tl.constexpr, PART: tl.constexpr):
    """Return inputs [start, start + PART) of the rows, 0 beyond the last."""
    inputs = start + tl.arange(0, PART)
    mask = is_row[:, None]
    if SIZE % (4 * PART):
        mask = mask & (inputs < SIZE)[None, :]
    return tl.load(x + row[:, None] * SIZE + inputs[None, :], mask, 0.0)


@triton.jit
def _take_rows(
    ids, words, scales, zeros, minimums, factors, inputs, y,
    OUTPUTS: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Widen one block of a row."""
    token = tl.program_id(0).to(tl.int64)
    step = tl.program_id(1)
    output = tl.load(ids + token) + tl.arange(0, 1)
    is_output = output < OUTPUTS
    groups = scales, zeros, minimums
    dtype: tl.constexpr = y.dtype.element_ty
    for index in tl.static_range(4):
        words_at = 4 * step + index if KIND == _INT8 else step
        found = _load_words(words, output, is_output, words_at, SIZE, PART, KIND)
        number = _to_numbers(found, index, dtype, KIND).to(tl.float32)
        start = step * 4 * PART + index * PART
        scale, shift = _scale_and_shift(groups, output, is_output, start, OUTPUTS, SIZE, GROUP)
        number = number * scale[:, None] + shift[:, None]
        if factors is not None:
            number *= tl.load(factors + output)[:, None]
        column = start + tl.arange(0, PART)
        inside = column < SIZE
        if inputs is not None:
            column = tl.load(inputs + column, inside, 0)
        tl.store(y + token * SIZE + column[None, :], number.to(dtype), inside[None, :])
