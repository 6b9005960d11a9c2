"""Weights of 4 or 8 bits as the kernels of int4.py read them."""

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

INT4, INT8, FP4 = range(3)
"""What the words of a weight hold."""

_ROWS_AT_ONCE = 1024
"""Rows packed at once. Bounds the size of the copies."""


class PackedInts(NamedTuple):
    """A weight [n, k] on the device: factor * scale * (value - zero), or with minimums factor *
    (scale * (value + 8) + minimum).

    A block is four parts of `part` neighbouring inputs. k is filled up to whole blocks.
    """

    words: torch.Tensor
    """4 bits: [n, blocks * part] int16. The four nibbles of word j of a block, lowest first, are
    input j of each of the four parts: value + 8, or the bits of an E2M1 number. So a thread reads
    neighbouring inputs of each part, and nothing is shuffled. 8 bits: [n, blocks * 4 * part] int8
    in the order of the inputs."""
    scales: torch.Tensor
    """[k / group, n] float16 or bfloat16: a tile of outputs reads neighbours."""
    zeros: torch.Tensor | None
    """[k / group, n] int8."""
    minimums: torch.Tensor | None
    """[k / group, n] float16."""
    factors: torch.Tensor | None
    """[n] float32."""
    size: int
    """k."""
    group: int
    part: int
    """32, or 16 if groups are not a multiple of 32."""
    kind: int
    """INT4, INT8 or FP4."""

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
