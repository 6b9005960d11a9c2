"""Where layers keep their state: `States` of a layer, and `StateRows` of a step's rows.

A state is what a layer without attention remembers of a sequence: it has the same size after any
number of tokens. Its parts are kept in pages of the KV pool.
"""

import dataclasses
from typing import NamedTuple

import torch

ALIGNMENT = 64  # bytes: a page's size is a multiple of it, and each part begins at one


def aligned(num_bytes: int) -> int:
    """Return `num_bytes`, rounded up to where a next part may begin."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class StatePart(NamedTuple):
    """One contiguous piece of a layer's state."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the part, without what aligns the next one."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Replay(NamedTuple):
    """Drafts of each row's last step that were accepted, which a step computes again, and drafts of
    the step itself, which the next one may compute again.

    Of a row's tokens of E, those that are computed again come first. What enters a layer for a
    draft is kept in the layer's log.
    """

    own: torch.Tensor  # [T] int64: the index in E of each of the step's own tokens
    # [E] int64: of each token of E, its index in T; or -1 - i, if row i of the log has it.
    sources: torch.Tensor
    # [E] int64: the row of the log that takes what enters for the token, perhaps one that an
    # earlier token of its row comes from. -1: nothing is kept.
    kept: torch.Tensor
    # Rows of a log. It has one more, which no token comes from.
    num_log_rows: int


@dataclasses.dataclass(frozen=True)
class StateRows:
    """Where the states of a step's R rows are, and which tokens change them.

    Layers with state compute E tokens, row after row.
    """

    pages: torch.Tensor  # [R, state_pages] int32, the pages of each row's sequence
    cu_seqlens: torch.Tensor  # [R + 1] int32: the index of each row's first token of E, then E
    # [R] int32: the state is written after so many of the row's tokens of E. 0: it stays.
    write_lens: torch.Tensor
    replay: Replay | None = None  # None: E = T, the step's own tokens, and none of them is a draft


class States(NamedTuple):
    """The state of one layer, of all sequences, in the pool."""

    pool: torch.Tensor  # [num_pages, page_bytes] uint8, contiguous
    # [parts, 2] int64: of each part, its page's column in `StateRows.pages`, and its first byte in
    # the page.
    places: torch.Tensor
    parts: tuple[StatePart, ...]
