"""Decides which tokens each step computes.

A sequence has `num_tokens` and `num_computed_tokens`; a step computes some of the difference. The
scheduler knows no phases (prefill, decode, resumption and draft verification are the same
arithmetic), no tensors and no text.
"""

from bisect import insort
from itertools import count

from nanovllm.scheduler.block_manager import BlockManager
from nanovllm.scheduler.extensions import Drafting
from nanovllm.scheduler.messages import Admission, NewBlocks, Row, RowDetails, Schedule, StepResult
from nanovllm.scheduler.prompt_queue import PromptQueue
from nanovllm.scheduler.sequence import Sequence
from nanovllm.scheduler.stats import SchedulerStats

_NO_DETAILS = RowDetails()


class Scheduler:
    """Continuous batching with chunked prefill, prefix caching and preemption by recomputation.

    Invariants, verified by tests/scheduler/invariants.py:
    - Every unfinished sequence is either running or waiting.
    - A running sequence owns a table row, and KV blocks for its computed tokens at least. A waiting
      sequence owns neither.
    - Running sequences are sorted by `Sequence.order`.
    - `PromptQueue` has the waiting ones, and the running ones whose prompt is not computed.
    - `0 <= num_computed_tokens <= num_tokens <= max_model_len`.

    A step takes running and waiting sequences in one order. The first that waits and does not fit
    ends the admissions. If the pool is full, the last running sequence is preempted: it loses its
    KV and waits again. Steps may overlap: tokens that a launched step will sample are pending.
    The cost of a step does not depend on how many are waiting.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: frozenset[int] = frozenset(),
        drafting: Drafting | None = None,
    ) -> None:
        self.block_manager = block_manager
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.drafting = drafting
        self.stats = SchedulerStats()
        self.running: list[Sequence] = []  # sorted by `Sequence.order`
        self._prompts = PromptQueue()
        self._sequences: dict[int, Sequence] = {}  # unfinished, by id
        self._free_table_indices = list(reversed(range(max_num_seqs)))
        self._step_ids = count()

    @property
    def num_unfinished(self) -> int:
        return len(self._sequences)

    @property
    def num_waiting(self) -> int:
        return len(self._sequences) - len(self.running)

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence, whose prompt must be shorter than max_model_len."""
        assert 0 < seq.num_prompt_tokens < self.max_model_len
        seq.eos_token_ids = frozenset() if seq.params.ignore_eos else self.eos_token_ids
        seq.stop_token_ids = seq.eos_token_ids.union(seq.params.stop_token_ids)
        longest = seq.num_prompt_tokens + seq.params.max_tokens
        seq.max_num_tokens = min(longest, self.max_model_len)
        self._sequences[seq.seq_id] = seq
        self._prompts.push(seq)

    def schedule(self) -> Schedule | None:
        """Return the next step, with blocks allocated for its rows; None if nothing can run now.

        May be called again before `update()` has taken the result of the previous step.
        """
        rows, new_blocks, admissions = self._schedule_rows()
        if not (rows or admissions):
            return None
        may_draft = False
        if rows and self.drafting is not None:
            rows, new_blocks, may_draft = self.drafting.extend(rows, new_blocks, self._sequences)
        step_id, to_zero = next(self._step_ids), self._blocks_to_zero(rows)
        seqs = (self._sequences[row.seq_id] for row in rows)
        tokens = [seq.take_unsent() for seq in seqs if seq.num_unsent_tokens]
        return Schedule(step_id, admissions, new_blocks, rows, to_zero, tokens, may_draft)

    def update(self, schedule: Schedule, result: StepResult) -> list[Sequence]:
        """Append a step's tokens; return the sequences that got any or failed, finished ones too.

        An error ends its sequence. What this step wrote for it is not published.
        """
        assert schedule.step_id == result.step_id
        advanced: list[Sequence] = []
        for row, tokens in zip(schedule.rows, result.token_ids, strict=True):
            num_tokens = row.num_scheduled_tokens - row.num_draft_tokens
            self.stats.num_prefill_tokens += num_tokens - row.samples
            seq = self._sequences.get(row.seq_id)
            if seq is None:  # finished or aborted while the step was in flight
                continue
            seq.num_in_flight_steps -= 1
            details = result.details.get(row.seq_id, _NO_DETAILS)
            if details.ending is not None:
                seq.doubts_kv = details.ending.doubts_kv
                self.finish(seq, *details.ending[:2])
                advanced.append(seq)
                continue
            if details.prompt_logprobs:
                seq.prompt_logprobs.update(details.prompt_logprobs)
            num_written = row.end
            if row.samples:
                num_known = len(seq.token_ids)
                num_written = num_known + len(tokens) - 1  # the last token has no KV yet
                seq.take_result(row, tokens, details)
                num_appended = len(seq.token_ids) - num_known
                self.stats.num_decode_tokens += num_appended
                if row.num_draft_tokens and self.drafting is not None:
                    self.drafting.record(seq, row, details, len(tokens) - 1, num_appended)
                advanced.append(seq)
            if seq.table_idx is not None:
                self.block_manager.publish(seq, num_written)
                if row.num_draft_tokens:  # so that rejected drafts cost nobody a block
                    self.block_manager.trim(seq, seq.num_computed_tokens)
            if seq.is_finished:
                self._remove(seq)
        return advanced

    def abandon(self, schedule: Schedule) -> None:
        """Undo a failed step: its sequences keep their tokens, lose their KV and wait again."""
        for row in schedule.rows:
            seq = self._sequences.get(row.seq_id)
            if seq is None:
                continue
            seq.num_in_flight_steps -= 1
            if row.samples:
                seq.num_pending_tokens -= 1
            if seq.table_idx is not None:
                self._preempt(seq)

    def finish(self, seq: Sequence, finish_reason: str, stop_reason: str | None = None) -> None:
        """End a sequence and free what it owns. One that has ended only gets these reasons."""
        seq.finish_reason, seq.stop_reason = finish_reason, stop_reason
        if seq.seq_id in self._sequences:
            self._remove(seq)

    def _schedule_rows(self) -> tuple[list[Row], list[NewBlocks], list[Admission]]:
        """Return rows for sequences in order, the blocks added to block tables, and the admissions.

        Merges two lists, both sorted by `Sequence.order`: `self.running` and the queue.
        """
        rows: list[Row] = []
        new_blocks: list[NewBlocks] = []
        admissions: list[Admission] = []
        # The step is done with running[:index]; nobody behind has a row yet.
        budget, index = self.max_num_batched_tokens, 0
        # The first of the queue. If it runs already, it is in running[index:], which is sorted.
        head = self._prompts.first()  # None: no more admissions in this step
        while budget > 0:
            seq = self.running[index] if index < len(self.running) else None
            if head is not None and (seq is None or head.order < seq.order):  # `head` waits
                admission = self._admit(head)
                if admission is None:
                    head = None
                    continue
                admissions.append(admission)
                seq, head = head, self._prompts.first()  # now it is running[index]
            elif seq is None:
                break
            index += 1
            num_missing = self._num_missing_tokens(seq)
            if num_missing <= 0:
                continue
            num_scheduled = self._row_length(seq, min(num_missing, budget))
            start, end = len(seq.block_table), seq.num_computed_tokens + num_scheduled
            appended = self.block_manager.allocate_blocks(seq, end)
            if appended is None:
                if seq.num_draft_tokens:  # behind drafts in flight: no row now, no preemption
                    continue
                head = None
                appended = self._allocate_by_preemption(seq, end)
                if appended is None:
                    continue
            row = seq.next_row(num_scheduled, samples=num_scheduled == num_missing)
            if appended:
                new_blocks.append(NewBlocks(row.table_idx, start, appended))
            rows.append(row)
            budget -= num_scheduled
            if seq.is_queued:
                # With its whole prompt it leaves the queue and comes earlier in order: that is
                # before `index`, too, and `head` is another.
                self.running.remove(seq)
                self._prompts.advance(seq, num_missing - num_scheduled)
                insort(self.running, seq, key=lambda s: s.order)
                head = head and self._prompts.first()
        return rows, new_blocks, admissions

    def _allocate_by_preemption(self, seq: Sequence, end: int) -> list[int] | None:
        """Preempt the last running sequences until `seq` has blocks for its first `end` tokens.

        Return the blocks appended; None if `seq` was the last itself, and is preempted now. No
        victim has a row in this step: each is `seq` or comes after it in order.
        """
        appended = None
        while appended is None:
            victim = self.running[-1]
            self._preempt(victim)
            self.stats.num_preemptions += 1
            if victim is seq:
                break
            appended = self.block_manager.allocate_blocks(seq, end)
        return appended

    def _admit(self, seq: Sequence) -> Admission | None:
        """Give a waiting sequence a table row and blocks; return None if they do not suffice."""
        # A preempted sequence resumes only when the tokens of its steps in flight are known.
        if not self._free_table_indices or seq.num_in_flight_steps:
            return None
        # Prompt log-probabilities need every prompt token's hidden state, so no prefix hits.
        needs_all = seq.params.prompt_logprobs is not None
        cached = [] if needs_all else self.block_manager.match_prefix(seq)
        blocks = self.block_manager.allocate_blocks(seq, seq.num_tokens, cached)
        if blocks is None:
            return None
        seq.num_computed_tokens = self.block_manager.hit_position(cached)
        if not seq.was_admitted:
            seq.num_cached_tokens = seq.num_computed_tokens
            queries = self.block_manager.enable_prefix_caching and not needs_all
            self.stats.count_prompt(seq.num_prompt_tokens, seq.num_cached_tokens, queries=queries)
        seq.table_idx = self._free_table_indices.pop()
        insort(self.running, seq, key=lambda s: s.order)
        return seq.admission(blocks)

    def _num_missing_tokens(self, seq: Sequence) -> int:
        """Return how many of the sequence's tokens the next step can compute.

        0 if steps in flight sample its last token, or if it must wait for their results.
        """
        drafts = seq.num_draft_tokens
        # How many of them are right is not known here, so neither is the next position.
        if drafts and (self.drafting is None or not self.drafting.may_follow(seq)):
            return 0
        in_flight = seq.num_pending_tokens + drafts
        num_tokens = len(seq.token_ids) + in_flight  # `Sequence.num_tokens`, without a call
        # A grammar may force tokens behind the sampled one: see `Sequence.force`.
        if in_flight and (num_tokens >= seq.max_num_tokens or seq.params.forces_tokens):
            return 0
        return num_tokens - seq.num_computed_tokens

    def _row_length(self, seq: Sequence, most: int) -> int:
        """Return how many tokens the sequence's next row computes: `most`, at least 1."""
        return most

    def _blocks_to_zero(self, rows: list[Row]) -> list[int]:
        """Return the blocks that `rows` begin and may not fill: some drafts may be missing."""
        found: list[int] = []
        size = self.block_manager.block_size
        for row in rows:
            if -row.num_computed_tokens % size < row.num_scheduled_tokens:  # it begins a block
                begun = self.block_manager.blocks_for(row.num_computed_tokens)
                first, end = max(begun, row.sample_position // size), -(-row.end // size)
                found += self._sequences[row.seq_id].block_table[first:end]
        return found

    def _preempt(self, seq: Sequence) -> None:
        self._release(seq)
        seq.num_computed_tokens = seq.num_draft_tokens = 0
        self._prompts.push(seq)

    def _release(self, seq: Sequence) -> None:
        # Launched steps may still write to its blocks and table row. Their next owner's steps are
        # launched after them, and steps run in that order.
        self.running.remove(seq)
        self.block_manager.free(seq, keep_cached=not seq.doubts_kv)
        assert seq.table_idx is not None
        self._free_table_indices.append(seq.table_idx)
        seq.table_idx = None

    def _remove(self, seq: Sequence) -> None:
        del self._sequences[seq.seq_id]
        if seq.table_idx is not None:
            self._release(seq)
        if seq.is_queued:
            self._prompts.remove(seq)
