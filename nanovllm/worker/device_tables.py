"""The device tables, one row for each running sequence, and the batches made from them.

From its admission on, a sequence has its tokens, block table and sampling parameters here. Sampled
tokens are written here on the device, so the next step can be built before the host sees them.
"""

from array import array
from collections.abc import Mapping, Sequence as Seq
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from nanovllm.attention.batch import Batch, HostLengths, Replaced
from nanovllm.core.messages import Admission, Row, Schedule
from nanovllm.core.worker_info import WorkerInfo, num_tables
from nanovllm.kernels.torch_kernels import Kernels
from nanovllm.layers.sampling_tensors import SamplingTensors, pack
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.platform import Platform

if TYPE_CHECKING:
    from nanovllm.layers.logits_rules import LogitsRule, LogitsRules
    from nanovllm.worker.state_table import StateTable


class DeviceTables:
    """Tokens, block tables and sampling parameters of the running sequences.

    The extra table row `scratch_idx` belongs to no sequence. Padding rows of a batch read and write
    it. Its block tables hold block `num_blocks`, which the scheduler never allocates.

    Args:
        user_rules: logits rules of the user's, by name.
    """

    def __init__(
        self,
        info: WorkerInfo,
        max_num_seqs: int,
        platform: Platform,
        kernels: Kernels,
        user_rules: "Mapping[str, type[LogitsRule]]" = MappingProxyType({}),
    ) -> None:
        num_rows = max_num_seqs + 1
        width = -(-info.max_model_len // info.block_size)
        self.block_size = info.block_size
        self.platform = platform
        self.device = platform.device
        self.kernels = kernels
        self._user_rules = user_rules
        self.scratch_idx = max_num_seqs
        # A table row's tokens and page ids are adjacent, so one upload writes all. The extra
        # token column takes what follows position max_model_len - 1: only warm-up samples there.
        num_columns = info.max_model_len + 1
        sizes = [num_columns, *[width] * num_tables(info.kv.windows), info.kv.state_pages, 1]
        self._table = platform.zeros((num_rows, sum(sizes)), torch.int32)
        self._table[self.scratch_idx, num_columns:-1] = info.num_blocks
        columns = self._table.split_with_sizes(sizes, 1)
        self.token_ids, self.block_tables, *others, pages, offsets = columns
        self.other_tables = tuple(others)
        self.rope_offsets = offsets[:, 0]
        self.state_table: StateTable | None = None
        if info.kv.state_pages:
            from nanovllm.worker import state_table

            self.state_table = state_table.StateTable(pages, info, platform)
        self.sampling_tensors = SamplingTensors.greedy(num_rows, self.device)
        # Of each row's last token, after accepted drafts: what `kernels.accept` found.
        self.last_positions = platform.zeros((num_rows,), torch.int64)
        # On the host, by table row:
        self.params = [SamplingParams()] * max_num_seqs
        self.num_prompt_tokens = [0] * max_num_seqs
        self.rules: list[LogitsRules | None] = [None] * max_num_seqs
        self._moved: set[int] = set()  # those with a rope offset
        self.plain = [True] * max_num_seqs  # no logits rules, no logprobs: a token is enough

    def apply(self, schedule: Schedule) -> None:
        """Write what changed since the last step: with one upload, or none if nothing changed.

        No cell is written twice: an admitted table row gets no new tokens in the same step, and
        new blocks only in block tables after its first, which models with windows have.
        """
        if self.state_table is not None:
            self.state_table.replays.begin(schedule)
        if not (schedule.admissions or schedule.new_tokens or schedule.new_blocks):
            return
        cells = array("q")
        values = array("q")
        num_columns = self.token_ids.shape[1]
        stride = self._table.shape[1]

        def write(column: int, table_idx: int, items: Seq[int]) -> None:
            first = table_idx * stride + column
            cells.extend(range(first, first + len(items)))
            values.extend(items)

        for new in schedule.admissions:
            write(0, new.table_idx, new.token_ids)
            write(num_columns, new.table_idx, new.block_ids)
            write(stride - 1, new.table_idx, [new.rope_offset])
        for tokens in schedule.new_tokens:
            write(tokens.start, tokens.table_idx, tokens.token_ids)
        for blocks in schedule.new_blocks:
            write(num_columns + blocks.start, blocks.table_idx, blocks.block_ids)
        admissions = schedule.admissions
        admitted = array("q", [new.table_idx for new in admissions])
        parameters = pack([new.params for new in admissions], [new.seed for new in admissions])
        sizes = [len(cells), len(values), len(admitted), len(parameters)]
        numbers = self.platform.upload(cells + values + admitted + parameters)
        uploaded = torch.split(numbers, sizes)
        self._table.view(-1)[uploaded[0]] = uploaded[1].int()
        if admissions:
            self.sampling_tensors.write(uploaded[2], uploaded[3])
            self._admit(admissions)

    def batch(self, rows: list[Row], rope: Seq[Replaced] = (), ends: Seq[Replaced] = ()) -> Batch:
        """Return the tokens of `rows` as a batch, in the order of the rows.

        `Batch.others` has the same tokens with each of `other_tables`.

        Args:
            rope: [N] each, for `Batch.rope_positions`, in place of position and offset.
            ends: [N] each, for `Batch.ends`, in place of position + 1.
        """
        query_lens = tuple(row.num_scheduled_tokens for row in rows)
        seq_lens = tuple(row.num_computed_tokens + row.num_scheduled_tokens for row in rows)
        num_tokens = sum(query_lens)
        numbers = [*(row.table_idx for row in rows), *query_lens, *seq_lens]
        table_indices, lens, stops = self.platform.upload(numbers).view(3, len(rows)).unbind()
        cu_seqlens = torch.zeros(len(rows) + 1, dtype=torch.int64, device=self.device)
        torch.cumsum(lens, 0, out=cu_seqlens[1:])
        # Row r ends at token cu_seqlens[r + 1] of the batch and at position stops[r] of its
        # sequence, so its token t has the position t + stops[r] - cu_seqlens[r + 1].
        token_rows = torch.arange(len(rows), device=self.device)
        token_rows = token_rows.repeat_interleave(lens, output_size=num_tokens)
        tokens = torch.arange(num_tokens, device=self.device)
        positions = tokens + (stops - cu_seqlens[1:])[token_rows]
        token_table_indices = table_indices[token_rows]
        input_ids = self.token_ids[token_table_indices, positions].long()
        rope_positions = None
        if rope or (self._moved and any(row.table_idx in self._moved for row in rows)):
            rope_positions = positions + self.rope_offsets[token_table_indices]
            for indices, values in rope:
                rope_positions[indices] = values
        key_ends = (positions + 1).int() if ends else None
        for indices, values in ends:
            assert key_ends is not None
            key_ends[indices] = values
        width = -(-max(seq_lens) // self.block_size)
        step = rows, table_indices, lens, cu_seqlens
        state = None if self.state_table is None else self.state_table.rows(*step)

        def batch(tables: torch.Tensor, others: tuple[Batch, ...] = ()) -> Batch:
            blocks = tables[token_table_indices, positions // self.block_size].long()
            return Batch(
                input_ids=input_ids,
                positions=positions,
                slot_mapping=blocks * self.block_size + positions % self.block_size,
                cu_seqlens_q=cu_seqlens.int(),
                seq_lens=stops.int(),
                block_tables=tables[table_indices, :width],
                lengths=HostLengths(query_lens, seq_lens),
                state=state,
                others=others,
                rope_positions=rope_positions,
                ends=key_ends,
            )

        return batch(self.block_tables, tuple(map(batch, self.other_tables)))

    def want_prompt_logprobs(self, rows: list[Row]) -> bool:
        """Return whether a step of `rows` needs the hidden states of all its tokens."""
        return any(self.params[row.table_idx].prompt_logprobs is not None for row in rows)

    def _admit(self, admissions: list[Admission]) -> None:
        """Set the host's part of the table rows."""
        for new in admissions:
            self.params[new.table_idx] = new.params
            self.num_prompt_tokens[new.table_idx] = new.num_prompt_tokens
            self.rules[new.table_idx] = None
            self.plain[new.table_idx] = new.params.is_plain
            self._moved.discard(new.table_idx)
            if new.rope_offset:
                self._moved.add(new.table_idx)
            if new.params.has_rules:
                from nanovllm.layers.logits_rules import LogitsRules

                words = new.bad_words, new.stop_token_ids
                self.rules[new.table_idx] = LogitsRules(
                    new.params, new.num_prompt_tokens, *words, self.device, self._user_rules
                )
