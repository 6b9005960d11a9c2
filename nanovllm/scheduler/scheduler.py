"""Decides which tokens each step computes.

A sequence has `num_tokens` and `num_computed_tokens`; a step computes some of the difference. There
are no phases: prefill, decode, resumption and draft verification are the same arithmetic.
"""

import dataclasses
from bisect import insort
from collections import Counter
from collections.abc import Sequence as Seq
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from nanovllm.core.messages import Admission, NewBlocks, Row, RowDetails, Schedule, StepResult
from nanovllm.core.sequence import Sequence
from nanovllm.errors import PluginError
from nanovllm.kv.block_manager import BlockManager
from nanovllm.kv.groups.group import StepPages
from nanovllm.kv.trie import Hit
from nanovllm.scheduler.fair_policy import FairPolicy
from nanovllm.scheduler.policy import Policy

if TYPE_CHECKING:
    from nanovllm.features.speculation.drafting import AdaptiveDrafting
    from nanovllm.scheduler.admission_hook import AdmissionHook

_NO_DETAILS = RowDetails()


class StallEvent(NamedTuple):
    """Why a sequence got no row in a step, or lost its KV."""

    seq_id: int
    reason: str  # "preempted"; or it waits for "blocks", a "table row", or its "steps in flight"
    preempted_by: int | None = None  # who needed blocks; itself, if nobody else could be preempted


@dataclasses.dataclass(slots=True)
class TierStats:
    """Counts since the engine started."""

    num_host_tokens: int = 0  # tokens whose KV came from host memory
    num_store_tokens: int = 0  # tokens whose KV came from a byte store
    num_swapped_tokens: int = 0  # those of both whose sequence had been preempted
    num_loads: int = 0  # loads that have ended
    num_failed_loads: int = 0  # those of them of which a part was missing or wrong
    num_offloaded_pages: int = 0  # pages that were copied to host memory


@dataclasses.dataclass(slots=True)
class SchedulerStats:
    """Counts since the engine started."""

    num_prefill_tokens: int = 0
    """Computed tokens from which no output token was sampled, without drafts."""
    num_decode_tokens: int = 0  # output tokens
    num_prompt_tokens: int = 0  # of the sequences that were admitted, each counted once
    num_queried_tokens: int = 0  # those of them that were looked up in the prefix cache
    num_cached_tokens: int = 0  # those of them whose KV came from the prefix cache
    num_preemptions: int = 0  # sequences that lost their KV because the pool was full
    step_sizes: Counter[int] = dataclasses.field(default_factory=Counter)
    """Launched steps, by the number of tokens that they compute."""
    tiers: TierStats | None = None  # None: there is no tier below the pool


class Scheduler:
    """Continuous batching with chunked prefill, prefix caching and preemption by recomputation.

    Invariants, verified by nanovllm/testing/invariants.py:
    - Every unfinished sequence is either running or waiting.
    - A running sequence owns a table row, and KV blocks for its computed tokens at least. A waiting
      sequence owns neither.
    - Running sequences are sorted by `Policy.order`.
    - The policy's queue has the waiting sequences that no hook holds back, and the running ones
      whose prompt is not computed.
    - `0 <= num_computed_tokens <= num_tokens <= max_model_len`.

    A step takes running and waiting sequences in one order. Admission stops at the first waiting
    sequence that does not fit. If the pool is full, a running sequence is preempted, by default the
    last: it loses its KV and waits again. Steps may overlap: tokens that a launched step will
    sample are pending. The cost of a step does not depend on how many are waiting.

    What `drafting` adds to rows is drafts; `hooks` may hold sequences back, asked in this order.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: frozenset[int] = frozenset(),
        drafting: "AdaptiveDrafting | None" = None,
        policy: Policy | None = None,
        hooks: "Seq[AdmissionHook]" = (),
    ) -> None:
        self.block_manager = block_manager
        # A step's last row of a prompt may go on for a few tokens more.
        self.max_num_batched_tokens = max_num_batched_tokens - block_manager.max_extra_tokens
        assert self.max_num_batched_tokens > 0
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.drafting = drafting
        self.policy: Policy = FairPolicy() if policy is None else policy
        self.stats = SchedulerStats()
        self.stalls: list[StallEvent] = []  # in the last `schedule`
        self.running: list[Sequence] = []  # sorted by `Policy.order`
        self._sequences: dict[int, Sequence] = {}  # unfinished, by id
        self._free_table_indices = list(reversed(range(max_num_seqs)))
        self._step_ids = count()
        self.hooks = tuple(hooks)
        for hook in self.hooks:
            hook.attach(self)

    @property
    def num_unfinished(self) -> int:
        """Number of unfinished sequences; 1 if only a hook has work left."""
        return len(self._sequences) or int(any(hook.has_work for hook in self.hooks))

    @property
    def num_waiting(self) -> int:
        return len(self._sequences) - len(self.running)

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence, whose prompt must leave room for a token if it generates."""
        assert 0 < seq.num_prompt_tokens <= self.max_model_len - seq.generates
        seq.eos_token_ids = frozenset() if seq.params.ignore_eos else self.eos_token_ids
        seq.stop_token_ids = seq.eos_token_ids.union(seq.params.stop_token_ids)
        longest = seq.num_prompt_tokens + seq.params.max_tokens
        seq.max_num_tokens = min(longest, self.max_model_len)
        self._sequences[seq.seq_id] = seq
        self._move(seq, is_queued=True)

    def schedule(self) -> Schedule | None:
        """Return the next step, with blocks allocated for its rows; None if nothing can run now.

        May be called again before `update()` has taken the result of the previous step.
        """
        for hook in self.hooks:
            hook.begin_step()
        self.stalls = []
        manager = self.block_manager
        manager.begin_step()
        rows, new_blocks, admissions = self._schedule_rows()
        if not (rows or admissions or any(hook.needs_step() for hook in self.hooks)):
            return None
        may_draft = False
        if rows and self.drafting is not None:
            rows, new_blocks, may_draft = self.drafting.extend(rows, new_blocks, self._sequences)
        width = manager.blocks_for(self.max_model_len)
        pages = StepPages(rows, admissions, self._sequences, width)
        manager.fill_step(pages)
        seqs = (self._sequences[row.seq_id] for row in rows)
        schedule = Schedule(
            next(self._step_ids),
            admissions,
            new_blocks + pages.new_blocks,
            rows,
            pages.blocks_to_zero,
            [seq.take_unsent() for seq in seqs if seq.num_unsent_tokens],
            may_draft,
            pages.copies,
        )
        for hook in self.hooks:
            schedule = hook.fill_step(schedule)
        return schedule

    def update(self, schedule: Schedule, result: StepResult) -> list[Sequence]:
        """Append a step's tokens; return the sequences that got any or failed, finished ones too.
        What the step wrote for a failed one is not published.
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
            if details.finish_info is not None:
                reason, detail, kv_invalid = details.finish_info
                self.finish(seq, reason, detail, keep_cached=not kv_invalid)
                advanced.append(seq)
                continue
            if details.prompt_logprobs:
                seq.output.prompt_logprobs.update(details.prompt_logprobs)
            if details.extras is not None:
                seq.take_extras(row, details.extras)
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
            elif not seq.generates and row.end == seq.num_prompt_tokens:
                seq.output.finish_reason = "stop"
                advanced.append(seq)
            if seq.table_idx is not None:
                self.block_manager.publish(seq, num_written)
                if row.num_draft_tokens:  # so that rejected drafts cost nobody a block
                    self.block_manager.trim(seq, seq.num_computed_tokens)
            if seq.is_finished:
                self._remove(seq)
        if schedule.copies:
            self.block_manager.end_copies(schedule.copies)
        for hook in self.hooks:
            hook.update(schedule, result)
        return advanced

    def abandon(self, schedule: Schedule) -> None:
        """Undo a failed step: its sequences keep their tokens, lose their KV and wait again."""
        for hook in self.hooks:
            hook.abandon(schedule)
        for row in schedule.rows:
            seq = self._sequences.get(row.seq_id)
            if seq is None:
                continue
            seq.num_in_flight_steps -= 1
            if row.samples:
                seq.num_pending_tokens -= 1
            if seq.table_idx is not None:
                self.preempt(seq)
        self.block_manager.undo_copies(schedule.copies)

    def finish(
        self,
        seq: Sequence,
        finish_reason: str,
        stop_reason: str | None = None,
        *,
        keep_cached: bool = True,
    ) -> None:
        """End a sequence and free what it owns; see `BlockManager.free`. If it has ended, only its
        reasons change.
        """
        seq.output.finish_reason = finish_reason
        seq.output.stop_reason = stop_reason
        if seq.seq_id in self._sequences:
            self._remove(seq, keep_cached=keep_cached)

    def reset_prefix_cache(self) -> bool:
        """Forget all that is cached, of pages and of hooks; return False, and forget none, while a
        sequence owns pages.
        """
        if not self.block_manager.reset_prefix_cache():
            return False
        for hook in self.hooks:
            hook.forget()
        return True

    # For hooks:

    def suspend(self, seq: Sequence) -> None:
        """Remove a sequence from the policy's queue, as if its prompt were computed: it waits, or
        runs without rows, until it is resumed.
        """
        self.policy.advance(seq, 0)
        self._move(seq, is_queued=False)

    def resume(self, seq: Sequence) -> None:
        """Return a suspended sequence to the policy's queue, with the turn it had."""
        self._move(seq, is_queued=True)

    def preempt(self, seq: Sequence) -> None:
        """Take a running sequence's table row and KV, and let it wait again."""
        self._release(seq)
        seq.num_computed_tokens = 0
        seq.num_draft_tokens = 0
        if not seq.is_queued:
            self._move(seq, is_queued=True)

    def is_unfinished(self, seq: Sequence) -> bool:
        """Return whether a sequence runs or waits."""
        return seq.seq_id in self._sequences

    def count_prompt(self, seq: Sequence) -> None:
        """Count the prefix hit of a sequence's first admission."""
        if seq.was_admitted:
            return
        seq.num_cached_tokens = seq.num_computed_tokens
        self.stats.num_prompt_tokens += seq.num_prompt_tokens
        self.stats.num_cached_tokens += seq.num_cached_tokens
        if self.block_manager.enable_prefix_caching and seq.longest_hit > 0:
            self.stats.num_queried_tokens += seq.num_prompt_tokens

    def _schedule_rows(self) -> tuple[list[Row], list[NewBlocks], list[Admission]]:
        """Merge running and queued sequences; return rows, blocks of tables, and admissions."""
        rows: list[Row] = []
        new_blocks: list[NewBlocks] = []
        admissions: list[Admission] = []
        paused: list[Sequence] = []  # prompts that end their rows early, so that others get theirs
        order = self.policy.order
        budget = self.max_num_batched_tokens
        index = 0  # the step is done with running[:index]; nobody after it has a row yet
        # The first prompt. If it runs already, it is in running[index:], which is sorted.
        head = self._first_prompt()  # None: no more admissions in this step
        while budget > 0:
            seq = self.running[index] if index < len(self.running) else None
            if head is not None and (seq is None or head[0] < order(seq)):  # it waits
                seq = head[1]
                admission = self._admit(seq)
                if admission is None:  # nobody goes before it, unless a hook holds it now
                    head = None if seq.is_queued else self._first_prompt()
                    continue
                admissions.append(admission)  # now `seq` is running[index]
                head = self._first_prompt()
            elif seq is None:
                break
            index += 1
            num_missing = self._num_missing_tokens(seq)
            if num_missing <= 0:
                continue
            num_scheduled = num_missing
            if num_missing > 1:
                num_scheduled = self.policy.share(seq, num_missing, budget)
                if seq.is_queued:
                    num_scheduled = self.block_manager.row_length(seq, num_scheduled)
            start = len(seq.kv.block_table)
            end = seq.num_computed_tokens + num_scheduled
            appended = self.block_manager.allocate_blocks(seq, end)
            if appended is None:
                if seq.num_draft_tokens:  # it waits: if they are rejected it needs no page
                    continue
                head = None
                appended = self._allocate_by_preemption(seq, end, index - 1)
                if appended is None:
                    continue
            row = seq.next_row(num_scheduled, is_last=num_scheduled == num_missing)
            if appended:
                new_blocks.append(NewBlocks(row.table_idx, start, appended))
            rows.append(row)
            budget -= num_scheduled
            if seq.is_queued:
                # Leaving the queue moves it forward in `running`, so none is skipped. With a rest
                # of its prompt it comes back after the step, and others get rows in this one.
                self.policy.advance(seq, num_missing - num_scheduled)
                if num_scheduled == num_missing or budget > 0:
                    self._move(seq, is_queued=False)
                if num_scheduled < num_missing and budget > 0:
                    paused.append(seq)
                head = head and self._first_prompt()
        for seq in paused:
            self._move(seq, is_queued=True)
        return rows, new_blocks, admissions

    def _first_prompt(self) -> tuple[Any, Sequence] | None:
        """Return the first prompt that runs already or that no hook holds, and its order."""
        while (seq := self.policy.first()) is not None:
            if seq.table_idx is not None or not any(hook.holds(seq) for hook in self.hooks):
                return self.policy.order(seq), seq
        return None

    def _allocate_by_preemption(self, seq: Sequence, end: int, index: int) -> list[int] | None:
        """Preempt running sequences until `seq`, which is running[index], has blocks for its first
        `end` tokens; return those appended, None if `seq` is preempted itself. Nobody from it on
        has a row in this step.
        """
        appended = None
        while appended is None:
            victim = self.policy.victim(tuple(self.running[index:]))
            self.preempt(victim)
            self.stats.num_preemptions += 1
            self.stalls.append(StallEvent(victim.seq_id, "preempted", seq.seq_id))
            if victim is seq:
                break
            appended = self.block_manager.allocate_blocks(seq, end)
        return appended

    def _admit(self, seq: Sequence) -> Admission | None:
        """Give a waiting sequence a table row and blocks; return None if they do not suffice."""
        if seq.table_idx is not None:  # the policy has changed the order of the running ones
            raise PluginError.of(
                "scheduling_policy",
                f"order() puts sequence {seq.seq_id} elsewhere than a moment ago: a key must not "
                "change, except when the sequence is pushed or removed",
            )
        # A preempted sequence resumes only when the tokens of its steps in flight are known.
        if not self._free_table_indices or seq.num_in_flight_steps:
            reason = "steps in flight" if seq.num_in_flight_steps else "table row"
            self.stalls.append(StallEvent(seq.seq_id, reason))
            return None
        hit: Hit | None = self.block_manager.match_prefix(seq)
        for hook in self.hooks:
            hit = hit and hook.prepare(seq, hit)
        blocks = None
        if hit is not None:
            blocks = self.block_manager.allocate_blocks(seq, seq.num_tokens, hit)
        if hit is None or blocks is None:
            for hook in self.hooks:
                hook.cancel(seq)
            if hit is not None:
                self.stalls.append(StallEvent(seq.seq_id, "blocks"))
            return None
        seq.table_idx = self._free_table_indices.pop()
        insort(self.running, seq, key=self.policy.order)
        admission = seq.admission(blocks)
        for hook in self.hooks:
            hook.admitted(seq, hit)
        if not seq.is_held:
            self.count_prompt(seq)
        return admission

    def _num_missing_tokens(self, seq: Sequence) -> int:
        """Return how many of the sequence's tokens the next step can compute; 0 if steps in flight
        sample its last token, if it must wait for their results, or if a hook holds it.
        """
        if seq.is_held:
            return 0
        drafts = seq.num_draft_tokens
        # How many of them are right is not known here, so neither is the next position.
        if drafts and (self.drafting is None or not self.drafting.may_follow(seq)):
            return 0
        in_flight = seq.num_pending_tokens + drafts
        num_tokens = len(seq.token_ids) + in_flight  # `Sequence.num_tokens`, without a call
        # A grammar may force tokens after the sampled one: see `Sequence.jump_forward`.
        if in_flight and (num_tokens >= seq.max_num_tokens or seq.params.can_jump_forward):
            return 0
        return num_tokens - seq.num_computed_tokens

    def _move(self, seq: Sequence, *, is_queued: bool) -> None:
        """Add a sequence to the policy's queue, or remove it. A running one is sorted in again."""
        if seq.table_idx is not None:
            self.running.remove(seq)
        if is_queued:
            self.policy.push(seq)
        else:
            self.policy.remove(seq)
        seq.is_queued = is_queued
        if seq.table_idx is not None:
            insort(self.running, seq, key=self.policy.order)

    def _release(self, seq: Sequence, *, keep_cached: bool = True) -> None:
        for hook in self.hooks:
            hook.release(seq)
        # Launched steps may still write to its blocks and table row. Their next owner's steps are
        # launched after them, and steps run in that order.
        self.running.remove(seq)
        self.block_manager.free(seq, keep_cached=keep_cached)
        assert seq.table_idx is not None
        self._free_table_indices.append(seq.table_idx)
        seq.table_idx = None

    def _remove(self, seq: Sequence, *, keep_cached: bool = True) -> None:
        del self._sequences[seq.seq_id]
        if seq.table_idx is not None:
            self._release(seq, keep_cached=keep_cached)
        if seq.is_queued:
            self._move(seq, is_queued=False)
        for hook in self.hooks:
            hook.remove(seq)
        self.policy.end(seq)
