"""Layers that attend to a window of tokens, and what they take of the KV pool. Imports nothing.

Layers with equal caches form a group. Group 0 has the layers that attend to all tokens: a block of
`block_size` tokens takes one page of the pool, whose id is in block table 0. A window group takes
`pages` pages for a block, whose ids are in as many further block tables. All pages are equal.
"""

from collections.abc import Sequence as Seq
from typing import NamedTuple


class WindowSpec(NamedTuple):
    """Layers that attend to a window of equally many tokens."""

    window: int
    """A token sees itself and the window - 1 tokens before it."""
    pages: int
    """Pages of the pool that a block takes: as many block tables."""

    def first_block(self, position: int, block_size: int) -> int:
        """Return the index of the first block that a token at `position`, or after it, reads."""
        return max(0, position - self.window + 1) // block_size


def num_tables(windows: Seq[WindowSpec]) -> int:
    """Return the number of block tables of a sequence, table 0 included."""
    return 1 + sum(group.pages for group in windows)


def pages_for(
    num_tokens: int, block_size: int, windows: Seq[WindowSpec], max_num_batched_tokens: int
) -> int:
    """Return the most pages that a sequence of up to `num_tokens` tokens needs at any time.

    A step computes up to `max_num_batched_tokens` tokens. Before these a window group holds
    `window` tokens: see `WindowGroup`.
    """
    num_blocks = -(-num_tokens // block_size)
    num_pages = num_blocks
    for window, pages in windows:
        length = window + max_num_batched_tokens
        touched = (length + block_size - 2) // block_size + 1  # of `length` tokens, at the worst
        num_pages += pages * min(num_blocks, touched)
    return num_pages
