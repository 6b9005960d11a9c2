"""The device tables, one row a slot, and the batch that a schedule makes of them.

A running sequence's tokens, block table and sampling state live here from its admission on;
sampled tokens are written back on the device, so the next step can be built before the host has
seen them. Knows no model.
"""

import torch

from nanovllm.attention.backend import Batch
from nanovllm.engine.kv_cache import zeros
from nanovllm.engine.schedule import CacheInfo, Row, Schedule


class SlotTables:
    """What the worker knows of the sequences that hold a slot."""

    def __init__(self, info: CacheInfo, max_num_seqs: int, device: torch.device) -> None:
        width = -(-info.max_model_len // info.block_size)
        self.block_size = info.block_size
        self.device = device
        self.token_ids = zeros((max_num_seqs, info.max_model_len), torch.int32, device)
        self.block_tables = zeros((max_num_seqs, width), torch.int32, device)
        self.temperatures = torch.zeros(max_num_seqs, dtype=torch.float32, device=device)
        self.seeds = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)

    def apply(self, schedule: Schedule) -> None:
        """Take in what changed since the last step."""
        for new in schedule.admissions:
            self._write(self.token_ids, new.slot, 0, new.token_ids)
            self._write(self.block_tables, new.slot, 0, new.block_ids)
        for blocks in schedule.new_blocks:
            self._write(self.block_tables, blocks.slot, blocks.start, blocks.block_ids)
        if schedule.admissions:
            slots = self._upload([new.slot for new in schedule.admissions], torch.int64)
            temperatures = [new.temperature for new in schedule.admissions]
            self.temperatures[slots] = self._upload(temperatures, torch.float32)
            self.seeds[slots] = self._upload([new.seed for new in schedule.admissions], torch.int64)

    def batch(self, rows: list[Row]) -> Batch:
        """Lay out the tokens of `rows` side by side."""
        query_lens = tuple(row.num_scheduled_tokens for row in rows)
        seq_lens = tuple(row.num_computed_tokens + row.num_scheduled_tokens for row in rows)
        num_tokens = sum(query_lens)
        slots, lens, ends = self._upload(
            [[row.slot for row in rows], query_lens, seq_lens], torch.int64
        )
        cu_seqlens = torch.zeros(len(rows) + 1, dtype=torch.int64, device=self.device)
        torch.cumsum(lens, 0, out=cu_seqlens[1:])
        # A token's position is its distance from the end of its row, taken from the end of its
        # sequence.
        token_rows = torch.arange(len(rows), device=self.device)
        token_rows = token_rows.repeat_interleave(lens, output_size=num_tokens)
        tokens = torch.arange(num_tokens, device=self.device)
        positions = tokens + (ends - cu_seqlens[1:])[token_rows]
        token_slots = slots[token_rows]
        blocks = self.block_tables[token_slots, positions // self.block_size].long()
        width = -(-max(seq_lens) // self.block_size)
        return Batch(
            input_ids=self.token_ids[token_slots, positions].long(),
            positions=positions,
            slot_mapping=blocks * self.block_size + positions % self.block_size,
            cu_seqlens_q=cu_seqlens.int(),
            seq_lens=ends.int(),
            block_tables=self.block_tables[slots, :width],
            query_lens_host=query_lens,
            seq_lens_host=seq_lens,
        )

    def sampling(self, rows: list[Row]) -> "SamplingRows":
        """Return where the rows that sample lie in the batch, and their sampling state."""
        last_tokens, slots, positions = [], [], []
        num_tokens = 0
        for row in rows:
            num_tokens += row.num_scheduled_tokens
            if row.samples:
                last_tokens.append(num_tokens - 1)
                slots.append(row.slot)
                positions.append(row.num_computed_tokens + row.num_scheduled_tokens)
        return SamplingRows(self, *self._upload([last_tokens, slots, positions], torch.int64))

    def _upload(self, values: object, dtype: torch.dtype) -> torch.Tensor:
        pinned = self.device.type == "cuda"
        return torch.tensor(values, dtype=dtype, pin_memory=pinned).to(
            self.device, non_blocking=True
        )

    def _write(self, table: torch.Tensor, slot: int, start: int, values: list[int]) -> None:
        table[slot, start : start + len(values)] = self._upload(values, table.dtype)


class SamplingRows:
    """The rows of a batch that sample a token, S of them."""

    def __init__(
        self,
        tables: SlotTables,
        last_tokens: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        self._tables = tables
        self._slots = slots
        self.last_tokens = last_tokens  # [S], index in the batch of each row's last token
        self.positions = positions  # [S], position of the token to be sampled

    @property
    def temperatures(self) -> torch.Tensor:
        return self._tables.temperatures[self._slots]

    @property
    def seeds(self) -> torch.Tensor:
        return self._tables.seeds[self._slots]

    def store(self, token_ids: torch.Tensor) -> None:
        """Write the sampled tokens [S] where the next step reads them."""
        # A row that fills max_model_len samples one token past the table; nothing ever reads it.
        kept = self.positions < self._tables.token_ids.shape[1]
        slots, positions = self._slots[kept], self.positions[kept]
        self._tables.token_ids[slots, positions] = token_ids[kept].int()
