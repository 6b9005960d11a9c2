"""Adds draft tokens to the rows of a step, decides which rows may follow drafts in flight, and
tells the controller what the step showed.

The workers propose, verify and keep the drafts.
"""

import dataclasses
import time
from collections.abc import Mapping

from nanovllm.core.messages import (
    MAX_SAMPLES,
    NewBlocks,
    Row,
    RowDetails,
    Schedule,
    StepResult,
)
from nanovllm.core.sequence import Sequence
from nanovllm.features.speculation.draft_controller import Acceptance, DraftController
from nanovllm.kv.block_manager import BlockManager
from nanovllm.outputs import DraftCounts


@dataclasses.dataclass(slots=True)
class SequenceDrafts(DraftCounts):
    """How the drafts of a sequence fared: since its start, and lately."""

    acceptance: Acceptance = dataclasses.field(default_factory=Acceptance)


@dataclasses.dataclass(eq=False)
class AdaptiveDrafting:
    """Adds as many drafts to the rows of a step as the controller expects to pay."""

    controller: DraftController
    block_manager: BlockManager
    max_num_batched_tokens: int
    follows_drafts: bool = False  # `DraftInfo.follows_drafts`
    counts: DraftCounts = dataclasses.field(default_factory=DraftCounts)

    def may_follow(self, seq: Sequence) -> bool:
        """Return whether a sequence with drafts in flight may get another row: see
        `Row.num_unverified_tokens`.
        """
        return self.follows_drafts and seq.params.is_plain

    def extend(
        self, rows: list[Row], new_blocks: list[NewBlocks], sequences: Mapping[int, Sequence]
    ) -> tuple[list[Row], list[NewBlocks], bool]:
        """Return a step's rows and new blocks with drafts, and whether the step may have any."""
        if self.follows_drafts:
            rows, new_blocks = self._take_back_followers(rows, new_blocks, sequences)
        if self.controller.skips_step():
            return rows, new_blocks, False
        return rows, new_blocks + self._add_drafts(rows, sequences), True

    def record(
        self, seq: Sequence, row: Row, details: RowDetails, num_accepted: int, num_appended: int
    ) -> None:
        """Learn how the drafts of a row fared.

        Args:
            num_appended: tokens that the row added: fewer than were accepted if the output ends.
        """
        drafts = _drafts_of(seq)
        num_proposed = details.num_draft_tokens
        self.controller.record(drafts.acceptance, row.num_draft_tokens, num_proposed, num_accepted)
        for counts in (drafts, self.counts):
            counts.add(num_proposed, min(num_appended, num_accepted))

    def settle(self, schedule: Schedule, result: StepResult, elapsed: float | None) -> None:
        """Tell the controller what a step cost, by the tokens that were really computed."""
        if not schedule.may_draft:
            return
        start = time.perf_counter()
        seconds = result.seconds
        if elapsed is not None:  # with what the host adds
            seconds += elapsed - (result.seconds + result.draft_seconds)
        num_allowed = sum(row.num_draft_tokens for row in schedule.rows)
        proposed = [found.num_draft_tokens for found in result.details.values()]
        num_proposed = sum(proposed)
        self.controller.record_step(
            schedule.num_tokens - num_allowed + num_proposed,
            seconds,
            sum(count > 0 for count in proposed),
            num_proposed,
            result.draft_seconds,
        )
        # A proposer that looked and found nothing took its time for the choice alone.
        in_vain = 0.0 if num_proposed else result.draft_seconds
        self.controller.add_host_seconds(time.perf_counter() - start + in_vain)

    def _add_drafts(self, rows: list[Row], sequences: Mapping[int, Sequence]) -> list[NewBlocks]:
        """Extend the `rows` of one token in place; return the blocks added to block tables.

        Drafts take tokens and blocks that the other rows left. They preempt no sequence.
        """
        num_tokens = sum(row.num_scheduled_tokens for row in rows)
        num_samples = sum(row.samples for row in rows)
        budget = min(self.max_num_batched_tokens - num_tokens, MAX_SAMPLES - num_samples)
        if budget <= 0:
            return []
        indices = [i for i, row in enumerate(rows) if row.samples and row.num_scheduled_tokens == 1]
        seqs = [sequences[rows[index].seq_id] for index in indices]
        candidates = []
        for seq in seqs:
            limit = min(seq.max_num_tokens - seq.num_tokens, budget)
            # Logits processors are the user's code: no draft may show them tokens that do not
            # count, and they may count their calls.
            limit = 0 if seq.params.logits_processors else limit
            candidates.append((_drafts_of(seq).acceptance, limit))
        start_choice = time.perf_counter()
        counts = self.controller.choose(candidates, num_tokens)
        self.controller.add_host_seconds(time.perf_counter() - start_choice)
        new_blocks = []
        for index, seq, count in zip(indices, seqs, counts, strict=True):
            row = rows[index]
            start = len(seq.kv.block_table)
            count = min(count, budget)
            appended = self.block_manager.allocate_blocks(seq, row.end + count)
            if appended is None:  # as many drafts as the sequence's blocks hold
                count = start * self.block_manager.block_size - row.end
            elif appended:
                new_blocks.append(NewBlocks(row.table_idx, start, appended))
            rows[index] = row._replace(num_scheduled_tokens=1 + count, num_draft_tokens=count)
            seq.num_draft_tokens += count
            seq.num_computed_tokens += count
            budget -= count
        return new_blocks

    def _take_back_followers(
        self, rows: list[Row], new_blocks: list[NewBlocks], sequences: Mapping[int, Sequence]
    ) -> tuple[list[Row], list[NewBlocks]]:
        """Return `rows` and `new_blocks` without those of rows whose positions only the device
        knows, unless such rows can run in this step: see `DraftInfo.follows_drafts`.
        """
        if not any(row.num_unverified_tokens for row in rows) or all(
            row.samples and row.num_scheduled_tokens == 1 and sequences[row.seq_id].params.is_plain
            for row in rows
        ):
            return rows, new_blocks
        taken = {row.table_idx: row for row in rows if row.num_unverified_tokens}
        for row in taken.values():
            seq = sequences[row.seq_id]
            # Undo `Sequence.next_row`.
            seq.num_computed_tokens -= row.num_scheduled_tokens
            seq.num_in_flight_steps -= 1
            seq.num_pending_tokens -= row.samples
            self.block_manager.trim(seq, seq.num_computed_tokens)
        return (
            [row for row in rows if row.table_idx not in taken],
            [new for new in new_blocks if new.table_idx not in taken],
        )


def _drafts_of(seq: Sequence) -> SequenceDrafts:
    """Return what is known of the drafts of `seq`; it begins with nothing."""
    output = seq.output
    if not isinstance(output.draft_counts, SequenceDrafts):
        output.draft_counts = SequenceDrafts()
    return output.draft_counts
