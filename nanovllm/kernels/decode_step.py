"""What a CUDA graph of a decode step does with the device tables, in plain torch.

It uses no number that only the host knows.
"""

import torch


def gather(
    token_ids: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    table_indices: torch.Tensor,
    positions: torch.Tensor,
    rope_offsets: torch.Tensor,
    columns: tuple[torch.Tensor, ...],
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Gather the inputs of a decode step from the device tables.

    Args:
        token_ids, block_tables: [table rows, n] int32; a row is contiguous.
        table_indices: [R] int64.
        positions: [R] int64, of the rows' input tokens.
        rope_offsets: [table rows] int32, in any stride.
        columns: any number of contiguous [table rows], of any dtype.

    Returns:
        First input_ids [R] int64, slot_mapping [R] int64, seq_lens [R] int32, block_tables
        [R, n] int32, the next positions [R] int64, and positions plus offsets [R] int64. Second,
        the R table rows of each of `columns`.
    """
    tables = block_tables[table_indices]
    following = positions + 1
    blocks = tables.gather(1, (positions // block_size)[:, None])[:, 0].long()
    slot_mapping = blocks * block_size + positions % block_size
    input_ids = token_ids[table_indices, positions].long()
    rope_positions = positions + rope_offsets[table_indices]
    inputs = input_ids, slot_mapping, following.int(), tables, following, rope_positions
    return inputs, tuple(column[table_indices] for column in columns)


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
    """Write `tokens` [R] at `positions` + 1 of the table rows, and to `out` [n] at `places`.

    Then add `moves` to `positions`, and `stride` to `places`, modulo the length of `out`. The
    tables get 0 for -1, no token, because the next step looks up its embedding. No two rows write
    the same cell, except in the scratch table row. All tensors but `token_ids`, int32, are int64.

    Raises:
        ValueError: `out` is not where the other tensors are. Triton can also write to pinned memory
            of the host, where the driver has an address of it for the GPU.
    """
    if out.device != tokens.device:  # torch would copy a single token, and wait for it
        raise ValueError(f"torch on {tokens.device} does not write to {out.device}")
    out[places] = tokens
    token_ids[table_indices, positions + 1] = tokens.clamp(min=0).int()
    positions.add_(moves)
    places.add_(stride).remainder_(len(out))


def accept(
    last_positions: torch.Tensor,
    table_indices: torch.Tensor,
    following: torch.Tensor,
    inputs: torch.Tensor,
    tokens: torch.Tensor,
) -> None:
    """Set `last_positions` by the drafts that `tokens` [S] confirm, as `worker.step_output` counts.

    Two neighbours with one table index and consecutive positions belong to one row: the input of
    the second is a draft, which the token of the first confirms or not. A row whose first token is
    -1, no token, moves on as if it had one; it ends with an error. All tensors are int64.

    Args:
        last_positions: [table rows]; the last table row belongs to no sequence.
        following: positions of `tokens`.
        inputs: tokens at the positions before; not read for the first of a row.
    """
    first = torch.ones_like(table_indices, dtype=torch.bool)
    first[1:] = table_indices[1:] != table_indices[:-1]
    first[1:] |= following[1:] != following[:-1] + 1
    wrong = torch.zeros_like(first)
    wrong[1:] = ~first[1:] & (inputs[1:] != tokens[:-1])
    # A token counts if the last event up to it is the beginning of a row, not a wrong draft.
    index = torch.arange(len(tokens), device=tokens.device)
    events = torch.where(first | wrong, 2 * index + first, 0)
    counts = events.cummax(0).values % 2 == 1
    last = counts.clone()
    last[:-1] &= ~counts[1:] | first[1:]
    places = torch.where(last, table_indices, len(last_positions) - 1)
    failed = (tokens < 0) & ~first
    last_positions[places] = following - failed.long()
