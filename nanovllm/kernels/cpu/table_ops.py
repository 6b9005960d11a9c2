"""The C kernels that read the device tables: a step's batch, and drafts by prompt lookup."""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch

from nanovllm.kernels.cpu import library


class StateColumns(NamedTuple):
    """Where the state pages of sequences are in the table, and where those of a step go."""

    source: torch.Tensor
    """[table rows, state_pages] int32: columns of the table."""
    pages: torch.Tensor
    """[most rows, state_pages] int32, of `kernels.states.StateRows`."""
    write_lens: torch.Tensor
    """[most rows] int32; gets the number of each row's tokens."""


def batch(
    token_ids: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    table_indices: Sequence[int],
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    rope_offsets: torch.Tensor,
    out: tuple[torch.Tensor, ...],
    state: StateColumns | None = None,
) -> None:
    """Fill `out`, and `state` if given, with the batch of a step.

    Row r of the batch has the last query_lens[r] of the first seq_lens[r] tokens of table row
    table_indices[r].

    Args:
        token_ids, block_tables: adjacent columns of one int32 table, a line per table row. Further
            block tables of equal width follow.
        rope_offsets: [table rows] int32, another column of it.
        out: input_ids, positions, slot_mapping, cu_seqlens_q, seq_lens, block_tables and
            rope_positions of `attention.batch.Batch`; they may be longer than the batch.
            slot_mapping and block_tables have one dimension more, of the block tables that are
            read.
    """
    rows = array("q", (*table_indices, *query_lens, *seq_lens))
    columns = token_ids.shape[1]
    stride = token_ids.stride(0)
    assert block_tables.data_ptr() == token_ids.data_ptr() + columns * token_ids.element_size()
    address, _ = rows.buffer_info()
    slots = out[2]
    tables, rope_positions = out[5:]
    num_tables, _, width = tables.shape
    assert block_tables.shape[1] == width
    assert columns + num_tables * width <= stride
    sizes = width, num_tables, slots.stride(0), tables.stride(0)
    offset = _column(rope_offsets, token_ids)
    assert columns + num_tables * width <= offset < stride
    states: tuple[library.Argument, ...] = 0, 0, None, None
    if state is not None:
        first_page = _column(state.source, token_ids)
        num_pages = state.pages.shape[1]
        assert state.source.shape[1] == num_pages
        assert columns + num_tables * width <= first_page <= stride - num_pages
        states = first_page, num_pages, state.pages, state.write_lens
    library.call(
        "nv_batch",
        *(token_ids, stride, columns, address, len(table_indices), block_size),
        *out[:6],
        *sizes,
        *(offset, rope_positions),
        *states,
    )


def _column(x: torch.Tensor, token_ids: torch.Tensor) -> int:
    """Return in which column of the table `x` begins, counted from the first of `token_ids`."""
    return (x.data_ptr() - token_ids.data_ptr()) // token_ids.element_size()


def ngram(
    token_ids: torch.Tensor,
    rows: Sequence[tuple[int, int, int, torch.Tensor]],
    sizes: tuple[int, int],
) -> list[int]:
    """Draft tokens by prompt lookup, as csrc/tables.c says; return how many each row got.

    Args:
        token_ids: [table rows, n] int32; a row is contiguous.
        rows: table_idx, number of known tokens, most drafts, and an index: int32 zeros, kept from
            call to call, [1 + 2 * number of sizes * a power of two not below the known tokens].
        sizes: the smallest and the largest n-gram.
    """
    table_indices, known, limits, indices = zip(*rows, strict=True)
    capacities = (len(index) // (2 * (sizes[1] - sizes[0] + 1)) for index in indices)
    pointers = (index.data_ptr() for index in indices)
    numbers = array("q", (*table_indices, *known, *limits, *pointers, *capacities))
    counts = array("q", limits)
    address = numbers.buffer_info()[0]
    out = counts.buffer_info()[0]
    library.call("nv_ngram", token_ids, token_ids.stride(0), address, len(rows), *sizes, out)
    return counts.tolist()
