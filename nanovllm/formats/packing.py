"""Integers of 2, 4 or 8 bits in words of 32 bits. Knows no checkpoint and no layer.

The lowest bits of a word come first. What a word has are numbers from 0 up; results are less by
half of their range, so that they fit int8.
"""

from collections.abc import Iterator

import torch

WORD_BITS = 32
_NUMBERS_AT_ONCE = 2**18
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where AWQ has the 4 bits of each of eight neighbours: the first in place 0, the next in 4."""


def row_ranges(start: int, stop: int, width: int) -> Iterator[tuple[int, int]]:
    """Yield the first row of each part of rows [start, stop), and the row behind the part.

    Parts bound the memory of temporary copies. They have a multiple of 32 rows, but for the last.
    """
    count = max(1, _NUMBERS_AT_ONCE // max(1, width) // 32) * 32
    for first in range(start, stop, count):
        yield first, min(first + count, stop)


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
