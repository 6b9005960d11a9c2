"""Prompt lookup: text that occurred before in a sequence is expected to continue as it did then.

Takes the tokens from the device tables and needs no model.
"""

import torch

from nanovllm.core.messages import Row, Schedule
from nanovllm.features.speculation.proposers.proposer import Proposer
from nanovllm.kernels.cpu import ops
from nanovllm.utils.memory import lazy_zeros
from nanovllm.worker.device_tables import DeviceTables

_MIN_CAPACITY = 64
"""Tokens that the smallest index of a table row has room for."""


class Ngram(Proposer):
    """Proposes the tokens that followed an n-gram before.

    The n-gram is the longest one, of prompt_lookup_min to prompt_lookup_max tokens, that ends with
    the last known token of the row and occurs earlier too; an earlier occurrence may overlap it. Of
    its earlier occurrences the last one counts. The drafts are the tokens after it. Where the known
    tokens end, they go on with the drafts themselves, so that a loop goes on as a loop. So a row
    gets all the drafts that it may have, or none.

    On a CPU, C looks the n-gram up in an index of the row, to which each call adds the tokens that
    are new. It costs microseconds, however long the row is. On a GPU, each call searches the whole
    row, and the host does not learn what was found: all drafts count as proposed. Where nothing was
    found, the tokens that the table already holds are the drafts, and are probably rejected.
    """

    def __init__(self, prompt_lookup_min: int, prompt_lookup_max: int) -> None:
        self._sizes = prompt_lookup_min, prompt_lookup_max
        self._indices: dict[int, torch.Tensor] = {}
        """By table row, for the C kernel; see `ops.ngram`."""

    def allocate(self, tables: DeviceTables, num_blocks: int) -> None:
        self._tables = tables
        self._uses_c = tables.kernels.name == "c"
        self._triton = tables.kernels.ngram
        self.follows_drafts = self._triton is not None

    def admit(self, schedule: Schedule) -> None:
        for admission in schedule.admissions:
            self._indices.pop(admission.table_idx, None)

    def propose(self, rows: list[Row]) -> list[int]:
        tables = self._tables
        limits = [row.num_draft_tokens for row in rows]
        if self._uses_c:
            items = [
                (row.table_idx, row.sample_position, row.num_draft_tokens, self._index(row))
                for row in rows
            ]
            return ops.ngram(tables.token_ids, items, self._sizes)
        if self._triton is not None:
            follows = [int(row.num_unverified_tokens > 0) for row in rows]
            # Behind the last position; one token is known there, before the drafts.
            known = (1 if row.num_unverified_tokens else row.sample_position for row in rows)
            numbers = [*(row.table_idx for row in rows), *known, *limits, *follows]
            columns = tables.platform.upload(numbers).view(4, len(rows))
            table_indices, num_known, num_drafts, offsets = columns.unbind()
            if any(follows):
                num_known.addcmul_(tables.last_positions[table_indices], offsets)
            self._triton.propose(
                tables.token_ids, table_indices, num_known, num_drafts, self._sizes
            )
            return limits
        found = [
            lookup(tables.token_ids[row.table_idx], row.sample_position, limit, self._sizes)
            for row, limit in zip(rows, limits, strict=True)
        ]
        if tables.platform.runs_ahead:  # the host does not wait for what was found
            return limits
        return [limit if hit else 0 for limit, hit in zip(limits, found, strict=True)]

    def _index(self, row: Row) -> torch.Tensor:
        """Return the index of a table row; a new and larger one if it is full.

        Its size follows the row's tokens. Adding the tokens again to an index of at least twice the
        size costs no more, on average, than adding them once.
        """
        index = self._indices.get(row.table_idx)
        smallest, largest = self._sizes
        entries = 2 * (largest - smallest + 1)
        if index is None or len(index) // entries < row.sample_position:
            capacity = 1 << max(row.sample_position, _MIN_CAPACITY - 1).bit_length()
            index = lazy_zeros((1 + entries * capacity,), torch.int32)
            self._indices[row.table_idx] = index
        return index


def lookup(
    tokens: torch.Tensor, num_known: int, num_drafts: int, sizes: tuple[int, int]
) -> torch.Tensor:
    """Propose for one row in plain torch, as `Ngram` says; the host does not wait for the device.

    Args:
        tokens: [n], the row's known tokens, and room for the drafts.
        sizes: the smallest and the largest n-gram.

    Returns:
        A bool: whether there is such an n-gram. If not, `tokens` is unchanged.
    """
    last = num_known - 1
    smallest, largest = sizes
    ends = torch.arange(num_known, device=tokens.device)
    lengths = torch.zeros_like(ends)  # of the n-gram that ends here and at `last`; not of `last`
    for size in range(1, min(largest, last) + 1):
        equal = tokens[: last - size + 1] == tokens[last - size + 1]
        lengths[size - 1 : last] += equal & (lengths[size - 1 : last] == size - 1)
    best = torch.where(lengths >= smallest, lengths * num_known + ends, -1).amax()
    found = best >= 0
    end = best % num_known
    steps = torch.arange(num_drafts, device=tokens.device)
    drafts = tokens[end + 1 + steps % (last - end).clamp(min=1)]
    place = tokens[num_known : num_known + num_drafts]
    place.copy_(torch.where(found, drafts, place))
    return found
