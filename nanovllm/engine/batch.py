"""The device tables, one row a slot, and the batch that a schedule makes of them.

A running sequence's tokens, block table and sampling state live here from its admission on;
sampled tokens are written back on the device, so the next step can be built before the host has
seen them. Knows no model.
"""

import torch

from nanovllm.attention.backend import Batch
from nanovllm.engine.kv_cache import zeros
from nanovllm.engine.schedule import Admission, CacheInfo, Row, Schedule
from nanovllm.layers.logits_rules import LogitsRules


class SlotTables:
    """What the worker knows of the sequences that hold a slot."""

    def __init__(self, info: CacheInfo, max_num_seqs: int, device: torch.device) -> None:
        width = -(-info.max_model_len // info.block_size)
        self.block_size = info.block_size
        self.device = device
        # One column more than a sequence can fill: its last sampled token has to go somewhere.
        self.token_ids = zeros((max_num_seqs, info.max_model_len + 1), torch.int32, device)
        self.block_tables = zeros((max_num_seqs, width), torch.int32, device)
        self.temperatures = torch.zeros(max_num_seqs, dtype=torch.float32, device=device)
        self.seeds = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.top_ks = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.top_ps = torch.zeros(max_num_seqs, dtype=torch.float32, device=device)
        self.min_ps = torch.zeros(max_num_seqs, dtype=torch.float32, device=device)
        # Host side, by slot: what decides how a row is sampled.
        self.admissions: list[Admission | None] = [None] * max_num_seqs
        self.rules: list[LogitsRules | None] = [None] * max_num_seqs

    def apply(self, schedule: Schedule) -> None:
        """Take in what changed since the last step."""
        for new in schedule.admissions:
            self._write(self.token_ids, new.slot, 0, new.token_ids)
            self._write(self.block_tables, new.slot, 0, new.block_ids)
        for blocks in schedule.new_blocks:
            self._write(self.block_tables, blocks.slot, blocks.start, blocks.block_ids)
        if schedule.admissions:
            self._admit(schedule.admissions)

    def batch(self, rows: list[Row]) -> Batch:
        """Lay out the tokens of `rows` side by side."""
        query_lens = tuple(row.num_scheduled_tokens for row in rows)
        seq_lens = tuple(row.num_computed_tokens + row.num_scheduled_tokens for row in rows)
        num_tokens = sum(query_lens)
        slots, lens, ends = self.upload([[row.slot for row in rows], query_lens, seq_lens])
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

    def upload(self, values: object, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Copy host numbers to the device without waiting for it."""
        pinned = self.device.type == "cuda"
        return torch.tensor(values, dtype=dtype, pin_memory=pinned).to(
            self.device, non_blocking=True
        )

    def _admit(self, admissions: list[Admission]) -> None:
        slots = self.upload([new.slot for new in admissions])
        params = [new.params for new in admissions]
        everything = 2**31 - 1
        columns: list[tuple[torch.Tensor, list[float] | list[int]]] = [
            (self.temperatures, [min(p.temperature, 1e30) for p in params]),
            (self.seeds, [new.seed for new in admissions]),
            (self.top_ks, [min(p.top_k or everything, everything) for p in params]),
            (self.top_ps, [p.top_p for p in params]),
            (self.min_ps, [p.min_p for p in params]),
        ]
        for column, values in columns:
            column[slots] = self.upload(values, column.dtype)
        for new in admissions:
            self.admissions[new.slot] = new
            self.rules[new.slot] = None
            if LogitsRules.needed(new.params):
                self.rules[new.slot] = LogitsRules(
                    new.params,
                    new.num_prompt_tokens,
                    new.bad_words,
                    new.stop_token_ids,
                    self.device,
                )

    def _write(self, table: torch.Tensor, slot: int, start: int, values: list[int]) -> None:
        table[slot, start : start + len(values)] = self.upload(values, table.dtype)
