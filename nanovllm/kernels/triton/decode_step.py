"""The first and the last Triton kernels of a decode step in a CUDA graph: `gather` reads the device
tables, `advance` writes them, and `accept` notes where rows with drafts end.

`Kernels` documents them. Each is one launch; torch would need about two dozen launches for the
first two. Imports triton: see `platform.cuda.triton_available`.
"""

import torch
import triton
import triton.language as tl

_ROWS = 128  # rows that one program of `advance` processes

_SAMPLES = 256  # samples that `accept` looks at in one turn

# One variant of each kernel serves all graphs and views. By default Triton compiles another one for
# an integer that is 1 or a multiple of 16, and for a pointer that is not aligned to 16 bytes.
_jit = triton.jit(
    do_not_specialize=["num_rows", "num_samples", "out_size", "stride"],
    do_not_specialize_on_alignment=[
        *("token_ids", "block_tables", "table_indices", "positions", "moves", "places", "tokens"),
        *("out", "input_ids", "slot_mapping", "following", "last_positions", "inputs"),
        *("rope_offsets", "rope_positions"),
    ],
)


def gather(
    token_ids: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    table_indices: torch.Tensor,
    positions: torch.Tensor,
    rope_offsets: torch.Tensor,
    columns: tuple[torch.Tensor, ...],
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    rows = len(table_indices)
    width = block_tables.shape[1]
    numbers = table_indices.new_empty(4, rows)
    input_ids, slot_mapping, following, rope_positions = numbers.unbind()
    seq_lens = table_indices.new_empty(rows, dtype=torch.int32)
    tables = table_indices.new_empty(rows, width, dtype=torch.int32)
    gathered = tuple(column.new_empty(rows) for column in columns)
    _gather[(rows,)](
        token_ids,
        token_ids.stride(0),
        block_tables,
        block_tables.stride(0),
        table_indices,
        positions,
        rope_offsets,
        rope_offsets.stride(0),
        columns,
        input_ids,
        slot_mapping,
        following,
        rope_positions,
        seq_lens,
        tables,
        gathered,
        WIDTH=width,
        BLOCK_SIZE=block_size,
        BLOCK=min(triton.next_power_of_2(width), 1024),
    )
    return (input_ids, slot_mapping, seq_lens, tables, following, rope_positions), gathered


def advance(
    token_ids: torch.Tensor,
    table_indices: torch.Tensor,
    positions: torch.Tensor,
    moves: torch.Tensor,
    places: torch.Tensor,
    tokens: torch.Tensor,
    out: torch.Tensor,
    stride: int,
) -> None:
    rows = len(table_indices)
    _advance[(triton.cdiv(rows, _ROWS),)](
        token_ids,
        token_ids.stride(0),
        table_indices,
        positions,
        moves,
        places,
        tokens,
        out,
        len(out),
        stride,
        rows,
        ROWS=_ROWS,
    )


def accept(
    last_positions: torch.Tensor,
    table_indices: torch.Tensor,
    following: torch.Tensor,
    inputs: torch.Tensor,
    tokens: torch.Tensor,
) -> None:
    _accept[(1,)](
        last_positions, table_indices, following, inputs, tokens, len(tokens), BLOCK=_SAMPLES
    )


@_jit
def _gather(
    token_ids,
    token_stride,
    block_tables,
    block_stride,
    table_indices,
    positions,
    rope_offsets,
    offset_stride,
    columns,
    input_ids,
    slot_mapping,
    following,
    rope_positions,
    seq_lens,
    tables,
    gathered,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gather one row of the batch."""
    row = tl.program_id(0)
    table_idx = tl.load(table_indices + row)
    position = tl.load(positions + row)
    tl.store(input_ids + row, tl.load(token_ids + table_idx * token_stride + position).to(tl.int64))
    tl.store(following + row, position + 1)
    offset = tl.load(rope_offsets + table_idx * offset_stride).to(tl.int64)
    tl.store(rope_positions + row, position + offset)
    tl.store(seq_lens + row, (position + 1).to(tl.int32))
    source = block_tables + table_idx * block_stride
    block = tl.load(source + position // BLOCK_SIZE).to(tl.int64)
    tl.store(slot_mapping + row, block * BLOCK_SIZE + position % BLOCK_SIZE)
    for i in tl.static_range(len(columns)):
        tl.store(gathered[i] + row, tl.load(columns[i] + table_idx))
    for start in range(0, WIDTH, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < WIDTH
        blocks = tl.load(source + offsets, inside)
        tl.store(tables + row.to(tl.int64) * WIDTH + offsets, blocks, inside)


@_jit
def _advance(
    token_ids,
    token_stride,
    table_indices,
    positions,
    moves,
    places,
    tokens,
    out,
    out_size,
    stride,
    num_rows,
    ROWS: tl.constexpr,
):
    """Advance ROWS rows. All padding rows write to the scratch table row."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    table_idx = tl.load(table_indices + rows, inside, 0)
    position = tl.load(positions + rows, inside, 0)
    token = tl.load(tokens + rows, inside, 0)
    known = tl.maximum(token, 0).to(tl.int32)
    tl.store(token_ids + table_idx * token_stride + position + 1, known, inside)
    place = tl.load(places + rows, inside, 0)
    tl.store(out + place, token, inside)
    tl.store(places + rows, (place + stride) % out_size, inside)
    tl.store(positions + rows, position + tl.load(moves + rows, inside, 0), inside)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@_jit
def _accept(
    last_positions, table_indices, following, inputs, tokens, num_samples, BLOCK: tl.constexpr
):
    """Find the last token of each row that counts. One program, for what is before a block matters.

    An event is the beginning of a row, with an odd number, or a wrong draft, with an even one. A
    token counts if the last event up to it is odd.
    """
    before = tl.zeros([], tl.int32)  # the last event of the blocks before
    for start in range(0, num_samples, BLOCK):
        samples = start + tl.arange(0, BLOCK)
        inside = samples < num_samples
        table_idx = tl.load(table_indices + samples, inside, -1)
        place = tl.load(following + samples, inside, 0)
        token = tl.load(tokens + samples, inside, -1)
        has_previous = inside & (samples > 0)
        previous = samples - 1
        joined = has_previous & (tl.load(table_indices + previous, has_previous, -1) == table_idx)
        joined &= tl.load(following + previous, has_previous, -1) + 1 == place
        confirmed = tl.load(tokens + previous, has_previous, -1)
        wrong = joined & (tl.load(inputs + samples, inside, 0) != confirmed)
        event = tl.where(joined, tl.where(wrong, 2 * samples, 0), 2 * samples + 1)
        event = tl.maximum(tl.associative_scan(event, 0, _larger), before)
        behind = samples + 1
        has_next = behind < num_samples
        goes_on = has_next & (tl.load(table_indices + behind, has_next, -1) == table_idx)
        goes_on &= tl.load(following + behind, has_next, -1) == place + 1
        goes_on &= tl.load(inputs + behind, has_next, -2) == token
        last = inside & (event % 2 == 1) & (goes_on == 0)
        failed = (token < 0) & joined
        tl.store(last_positions + table_idx, place - failed.to(tl.int64), last)
        before = tl.max(event)
