"""Prompt lookup on a GPU: each call searches all of its rows in the token table.

Blocks of a row are searched in parallel, and a second launch takes the best match. The host
never waits for the device, and the grids do not depend on the rows' lengths. Importing this module
imports triton: see `platform.cuda.triton_available`.
"""

import torch
import triton
import triton.language as tl

_BLOCK = 1024  # positions that one program searches
_PARTS = 128  # blocks whose results are compared at once
_DRAFTS = 32  # drafts that are written at once
_COLUMNS = ["table_indices", "num_known", "num_drafts"]
"""Arguments that are parts of one upload. Their alignment depends on the number of rows."""


def propose(
    token_ids: torch.Tensor,
    table_indices: torch.Tensor,
    num_known: torch.Tensor,
    num_drafts: torch.Tensor,
    sizes: tuple[int, int],
) -> None:
    """Write drafts into table rows, as `speculation.proposers.ngram.Ngram` chooses them.

    A row without such an n-gram is unchanged.

    Args:
        token_ids: [table rows, n] int32; a row is contiguous.
        table_indices, num_known, num_drafts: [R] int64.
        sizes: the smallest and the largest n-gram.
    """
    rows = len(table_indices)
    parts = triton.cdiv(token_ids.shape[1], _BLOCK)
    best = table_indices.new_empty(rows, parts)
    stride = token_ids.stride(0)
    _find[(rows, parts)](token_ids, stride, table_indices, num_known, best, *sizes, BLOCK=_BLOCK)
    _copy[(rows,)](
        token_ids,
        stride,
        table_indices,
        num_known,
        num_drafts,
        best,
        parts,
        PARTS=_PARTS,
        DRAFTS=_DRAFTS,
    )


@triton.jit(do_not_specialize_on_alignment=_COLUMNS)
def _find(
    token_ids, stride, table_indices, num_known, best, smallest, largest, BLOCK: tl.constexpr
):
    """Find the best end of an n-gram in one block of a row.

    `best` gets length * 2**32 + end + 1: so a longer n-gram is better, and a later one of those. It
    gets 0 if there is none.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    tokens = token_ids + tl.load(table_indices + row) * stride
    last = tl.load(num_known + row) - 1
    ends = part.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    lengths = tl.zeros([BLOCK], tl.int64)
    for size in range(tl.where(part * BLOCK < last, largest, 0)):
        inside = (ends < last) & (ends >= size)
        wanted = tl.load(tokens + last - size, size <= last, -1)
        equal = inside & (tl.load(tokens + ends - size, inside, -1) == wanted)
        lengths += (equal & (lengths == size)).to(tl.int64)
    keys = tl.where(lengths >= smallest, lengths * 2**32 + ends + 1, 0)
    tl.store(best + row * tl.num_programs(1) + part, tl.max(keys))


@triton.jit(do_not_specialize_on_alignment=_COLUMNS)
def _copy(
    token_ids,
    stride,
    table_indices,
    num_known,
    num_drafts,
    best,
    num_parts,
    PARTS: tl.constexpr,
    DRAFTS: tl.constexpr,
):
    """Write the drafts of one row: the tokens after the best end, again and again."""
    row = tl.program_id(0).to(tl.int64)
    tokens = token_ids + tl.load(table_indices + row) * stride
    known = tl.load(num_known + row)
    found = tl.zeros([PARTS], tl.int64)
    for start in range(0, num_parts, PARTS):
        parts = start + tl.arange(0, PARTS)
        found = tl.maximum(found, tl.load(best + row * num_parts + parts, parts < num_parts, 0))
    key = tl.max(found)
    following = key & (2**32 - 1)
    count = tl.where(key > 0, tl.load(num_drafts + row), 0)
    for start in range(0, count, DRAFTS):
        steps = start + tl.arange(0, DRAFTS)
        drafts = tl.load(tokens + following + steps % (known - following), steps < count)
        tl.store(tokens + known + steps, drafts, steps < count)
